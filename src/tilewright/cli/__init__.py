"""The commands, one a file. Each imports what it needs when it runs, so that --help needs no torch."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

from tilewright import __version__, settings
from tilewright.cli.audit import audit
from tilewright.cli.bench import bench
from tilewright.cli.check import check
from tilewright.cli.explain import explain
from tilewright.cli.gpu import gpu
from tilewright.cli.inspect import inspect
from tilewright.cli.ops import ops
from tilewright.cli.profile import profile
from tilewright.cli.report import report
from tilewright.cli.roofline import roofline
from tilewright.cli.shared import one_line
from tilewright.cli.tune import tune
from tilewright.errors import TilewrightError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Proven, fast GPU kernels for PyTorch, and the workbench they were proven on.",
)
for _command in (ops, check, bench, audit, inspect, explain, profile, tune, gpu, roofline, report):
    app.command()(_command)


def main() -> None:
    """Run the command line: errors are one line on stderr; 0 good, 1 the kernel is not, 2 the user's mistake."""
    warnings.filterwarnings("ignore", module="torch")  # its advice to the author of a kernel is not the verdict
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)  # nor what its search left out
    try:
        code = app(standalone_mode=False)
    except TilewrightError as error:
        _fail(one_line(error))
    except KeyboardInterrupt:
        _fail("stopped", code=130)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader left: nothing more to say to it
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message"):  # the argument parser's own complaint
            _fail(f"{error.format_message()} See: tilewright --help")  # type: ignore[attr-defined]
        if type(error).__name__ == "Abort":
            _fail("stopped", code=130)
        if settings.debug():
            raise
        _fail(f"unexpected {type(error).__name__}: {one_line(error)}; set TILEWRIGHT_DEBUG=1 to see where", code=3)
    finally:
        gc.freeze()  # the process ends: to look through all of torch for garbage would take most of a second
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"tilewright: {message}", file=sys.stderr)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None: ...
