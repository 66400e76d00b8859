"""The command `tilewright tune`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import AsJson, Cases, Dtypes, Kernels, OpName
from tilewright.cli.shared import console, load_op, parse_cases, parse_dtypes, progress, say_next, table
from tilewright.errors import NoGPU, NothingToTune
from tilewright.report.formatting import digits

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.workbench.tune import Search


def tune(
    op_name: OpName,
    kernel: Kernels = None,
    case: Cases = None,
    dtype: Dtypes = None,
    samples: Annotated[int, typer.Option(min=6, metavar="INTEGER", help="Samples per configuration.")] = 15,
    save: Annotated[
        bool, typer.Option("--save", help="Save the best configurations in the package, for calls on this GPU model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest kernel configurations on this GPU. Each is checked before it is timed.

    Calls never search by themselves, and without --save nothing is saved.
    """
    from tilewright import hardware, registry

    op = load_op(op_name)
    kernels = [one for one in registry.pick(op, kernel or []) if one.language in ("triton", "cuda")]
    dtypes = parse_dtypes(op, dtype) or op.bench_dtypes
    cases = [c.with_dtype(d) for d in dtypes for c in parse_cases(op, case) or op.bench]
    if not kernels:
        raise NothingToTune(op_name)
    if not hardware.has_gpu():
        raise NoGPU("tune")
    from tilewright.timer import Timer
    from tilewright.workbench import tune as tool

    gpu = hardware.current_gpu()["gpu"]
    found = []
    with progress(f"tuning {op_name}", None) as advance:
        for search in tool.tune(op, kernels, cases, clock=Timer(), samples=samples, on_step=advance):
            found.append(search)
            if as_json:
                print(json.dumps(tool.as_json(search, gpu)))
    if not found:
        raise NothingToTune(op_name)
    if save:
        tool.save(found, gpu)
    if not as_json:
        console().print(_table(found))
        better = sum(search.winner is not None for search in found)
        unsaved = f"{better} configurations beat the default; save them with --save"
        say_next(f"tilewright bench {op_name}" if save or not better else unsaved)


def _table(found: list[Search]) -> Table:
    numbers = ("time (us)", "default (us)", "tried")
    shown = table("kernel", "case", "direction", "best configuration", right=numbers)
    for search in found:
        best = search.best
        words = ", ".join(f"{name}={value}" for name, value in best.config.items()) if best else "none is correct"
        shown.add_row(
            search.kernel,
            f"{search.case} {search.case.dtype}",
            search.direction,
            words if search.winner or not best else f"{words} (no faster than the default)",
            digits(best.us if best else None),
            digits(search.default_us),
            str(len(search.attempts)),
        )
    return shown
