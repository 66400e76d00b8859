"""The command line, one module per command. Each imports torch only when it runs, so that --help is fast."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

from tilewright import __version__, settings
from tilewright.cli import arena, kernels, records
from tilewright.cli.audit import audit
from tilewright.cli.bench import bench
from tilewright.cli.check import check
from tilewright.cli.compare import compare
from tilewright.cli.evolve import evolve
from tilewright.cli.explain import explain
from tilewright.cli.floor import floor
from tilewright.cli.gpu import gpu
from tilewright.cli.inspect import inspect
from tilewright.cli.mcp import mcp
from tilewright.cli.ops import ops
from tilewright.cli.options import Command
from tilewright.cli.profile import profile
from tilewright.cli.report import report
from tilewright.cli.roofline import roofline
from tilewright.cli.shared import one_line
from tilewright.cli.train_step import train_step
from tilewright.cli.tune import tune
from tilewright.errors import TilewrightError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Proven, fast GPU kernels for PyTorch, and the workbench they were proven on.",
)
for _command, _summary in (
    (ops, "List the operations and their kernels."),
    (check, "Check kernels against a float64 reference."),
    (bench, "Time kernels against the ceilings of this GPU."),
    (compare, "Compare two files of timing records."),
    (floor, "Show the minimum time of each case on a GPU."),
    (audit, "Count the bytes a Triton kernel moves; find bad accesses."),
    (inspect, "Show registers, occupancy and instructions."),
    (explain, "Find the bottleneck of a kernel and what to try next."),
    (profile, "Measure calls with ncu, Proton and torch.profiler."),
    (tune, "Search for the fastest configurations on this GPU."),
    (train_step, "Measure a training step: tokens/s, MFU, bottleneck."),
    (gpu, "Show this GPU, or the datasheet of another."),
    (roofline, "Draw the roofline of a GPU with its kernels."),
    (report, "Build an HTML site from records."),
    (mcp, "Serve the workbench to coding agents (MCP)."),
    (evolve, "Let a program write kernels, judge them, and repeat."),
):
    app.command(short_help=_summary, cls=Command)(_command)
app.add_typer(arena.app, name="arena", short_help="Judge submitted kernels, rank and publish them.")
app.add_typer(kernels.app, name="kernels", short_help="Build our layers for Hugging Face's kernels.")
app.add_typer(records.app, name="records", short_help="List fresh and stale records, or verify them.")


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 a kernel is not good, 2 the user's mistake, 3 a bug."""
    warnings.filterwarnings("ignore", module="torch")  # advice to authors of kernels, not to users
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    try:
        code = app(prog_name="tilewright", standalone_mode=False)
    except TilewrightError as error:
        _fail(one_line(error))
    except KeyboardInterrupt:
        _fail("interrupted", code=130)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of the pipe has left
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message"):  # an error of the argument parser
            command = getattr(getattr(error, "ctx", None), "command_path", "tilewright")
            message = error.format_message().removeprefix("Invalid value: ").rstrip(".")  # type: ignore[attr-defined]
            _fail(f"{message}. See: {command} --help")
        if type(error).__name__ == "Abort":
            _fail("interrupted", code=130)
        if settings.debug():
            raise
        message = f"unexpected {type(error).__name__}: {one_line(error)}; set TILEWRIGHT_DEBUG=1 for the traceback"
        _fail(message, code=3)
    finally:
        gc.freeze()  # the process ends; collecting the garbage of torch would take most of a second
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"tilewright: {message}", file=sys.stderr)
    sys.exit(code)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...
