"""`tilewright tune`"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    Kernels,
    OpName,
    cases_of,
    console,
    dtypes_of,
    load_op,
    progress,
    say_next,
)
from tilewright.errors import NoGPU, NothingToTune

if TYPE_CHECKING:
    from tilewright.workbench.tune import Search


def tune(
    op_name: OpName,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    samples: Annotated[
        int | None, typer.Option(min=6, help="Timed samples of each configuration; 15 unless told.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write the winners into the package, where calls on such a GPU find them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Which configuration is best here? Try what OP's kernels leave open on its bench cases, check and time each.

    Calls never search by themselves; without --keep nothing changes.
    """
    from tilewright import hardware, registry

    op = load_op(op_name, None)
    kernels = [one for one in registry.pick(op, kernel or []) if one.language in ("triton", "cuda")]
    dtypes = dtypes_of(op, dtype) or op.bench_dtypes
    cases = [c.with_dtype(d) for d in dtypes for c in cases_of(op, case) or op.bench]
    if not kernels:
        raise NothingToTune(op_name)
    if not hardware.has_gpu():
        raise NoGPU("tune")
    from tilewright.timer import Timer
    from tilewright.workbench import tune as tool

    gpu = hardware.in_hand()["gpu"]
    found = []
    with progress(f"tuning {op_name}", None) as advance:
        for search in tool.tune(op, kernels, cases, clock=Timer(), samples=samples or tool.SAMPLES, on_step=advance):
            found.append(search)
            if as_json:
                print(json.dumps(tool.as_json(search, gpu)))
    if not found:
        raise NothingToTune(op_name)
    if keep:
        tool.keep(found, gpu)
    if not as_json:
        console().print(_table(found))
        better = sum(search.winner is not None for search in found)
        kept = "written down" if keep else "not written down: add --keep"
        say_next(f"tilewright bench {op_name}" if keep or not better else f"{better} better than the default, {kept}")


def _table(found: list[Search]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kernel", "case", "direction", "best configuration"):
        table.add_column(column)
    for column in ("time", "default", "tried"):
        table.add_column(column, justify="right", no_wrap=True)
    for search in found:
        best = search.best
        words = ", ".join(f"{name} {value}" for name, value in best.config.items()) if best else "none is right"
        table.add_row(
            search.kernel,
            f"{search.case} {search.case.dtype}",
            search.direction,
            words if search.winner or not best else f"{words} (the default is as good)",
            f"{best.us:.1f} us" if best and best.us else "",
            f"{search.default_us:.1f} us" if search.default_us else "",
            str(len(search.tried)),
        )
    return table
