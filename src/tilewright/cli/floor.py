"""The command `tilewright floor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import AsJson, Cases, Dtypes, OpName
from tilewright.cli.shared import (
    bottleneck,
    console,
    load_op,
    parse_cases,
    parse_dtypes,
    require_choice,
    say_next,
    table,
)
from tilewright.cost import DIRECTIONS, size
from tilewright.report.formatting import digits

if TYPE_CHECKING:
    from tilewright.spec import Case, Cost


def floor(
    op_name: OpName,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU with a datasheet; `tilewright gpu` lists them.")],
    case: Cases = None,
    dtype: Dtypes = None,
    direction: Annotated[
        str, typer.Option(metavar="DIRECTION", help="forward, backward, both (in one call), or all three.")
    ] = "forward",
    as_json: AsJson = False,
) -> None:
    """Show the minimum time of each case on a GPU: its minimum bytes and FLOPs at the datasheet's rates."""
    from tilewright import hardware
    from tilewright.workbench.bench.runner import cost_of

    require_choice("--direction", direction, (*DIRECTIONS, "all"))
    sheet, op = hardware.datasheet(gpu), load_op(op_name)
    cases, dtypes = parse_cases(op, case) or op.bench, parse_dtypes(op, dtype) or op.bench_dtypes
    floors: list[tuple[Case, str, Cost, str, float]] = []
    for one in (c.with_dtype(d) for d in dtypes for c in cases):
        for each in DIRECTIONS if direction == "all" else (direction,):
            cost = cost_of(op, one, each)
            if cost.bytes:
                floors.append((one, each, cost, *cost.floor(sheet.rates())))
    if as_json:
        for one, each, cost, unit, seconds in floors:
            about = {"op": op_name, "case": dict(one.point), "dtype": one.dtype, "direction": each}
            result = {"us": seconds * 1e6, "bound_by": unit, **vars(cost)}
            print(json.dumps({"kind": "floor", "gpu": sheet.name, **about, **result}))
        return
    numbers = ("read", "written", "floor (us)")
    shown = table(
        "case", "direction", right=numbers, last=("bound by",), title=f"{op_name}: minimum time on {sheet.name}"
    )
    for one, each, cost, unit, seconds in floors:
        shown.add_row(
            f"{one} {one.dtype}", each, size(cost.read), size(cost.written), digits(seconds * 1e6), bottleneck(unit)
        )
    console().print(shown)
    say_next(f"tilewright explain {op_name} --gpu {sheet.name}")
