"""The command `tilewright floor`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.gpus import PRICE_COLUMNS, Gpus, Prices, order, parse_gpus, parse_prices, price_cells, price_fields
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
    from rich.table import Table

    from tilewright.hardware import GPU
    from tilewright.spec import Case, Cost, Op

NOT_AVAILABLE = "not available"
BEST = 3  # GPUs of the next command


@dataclass(frozen=True)
class Floor:
    """The minimum time of a call on one GPU."""

    case: Case
    direction: str
    gpu: GPU
    cost: Cost

    @property
    def missing(self) -> list[str]:
        """The units of the call for which the datasheet has no rate."""
        return [unit for unit in self.cost.flops if not self.gpu.rates().get(unit)]

    @property
    def us(self) -> float | None:
        """The time of the busiest unit; None if a unit other than special functions has no rate."""
        if set(self.missing) - {"special"}:
            return None
        return self.cost.floor(self.gpu.rates())[1] * 1e6

    @property
    def bound_by(self) -> str:
        if self.us is None:
            return f"no rate of {', '.join(self.missing)} on the datasheet"
        note = " (special functions: no rate on the datasheet)" if self.missing else ""
        return bottleneck(self.cost.floor(self.gpu.rates())[0]) + note

    def as_json(self, op: str) -> dict[str, Any]:
        about = {"op": op, "case": dict(self.case.point), "dtype": self.case.dtype, "direction": self.direction}
        unit = None if self.us is None else self.cost.floor(self.gpu.rates())[0]
        result = {"us": self.us, "bound_by": unit, "no_rate": self.missing, **vars(self.cost)}
        return {"kind": "floor", "gpu": self.gpu.name, **about, **result}


def floor(
    op_name: OpName,
    gpu: Gpus,
    case: Cases = None,
    dtype: Dtypes = None,
    direction: Annotated[
        str,
        typer.Option("--direction", metavar="DIRECTION", help="forward, backward, both (in one call), or all three."),
    ] = "forward",
    price: Prices = None,
    as_json: AsJson = False,
) -> None:
    """Show the minimum time of each case on GPUs: its minimum bytes and FLOPs at the datasheet's rates."""
    require_choice("--direction", direction, (*DIRECTIONS, "all"))
    gpus = parse_gpus(gpu)
    prices, op = parse_prices(price, gpus), load_op(op_name)
    cases, dtypes = parse_cases(op, case) or op.bench, parse_dtypes(op, dtype) or op.bench_dtypes
    selected = [one.with_dtype(each) for each in dtypes for one in cases]
    directions = DIRECTIONS if direction == "all" else (direction,)
    groups = [
        sorted(group, key=lambda one: order(one.us, prices.get(one.gpu.name)))
        for group in _floors(op, selected, directions, gpus)
    ]
    if as_json:
        for one in (one for group in groups for one in group):
            print(json.dumps(one.as_json(op_name) | price_fields(prices.get(one.gpu.name), one.us)))
        return
    console().print(_table(op_name, groups, gpus, prices))
    best = [one.gpu.name for one in groups[0] if not one.gpu.unpublished][:BEST] if groups else []
    say_next(" ".join(["tilewright explain", op_name, *(f"--gpu {name}" for name in best)]))


def _floors(op: Op, cases: Sequence[Case], directions: Sequence[str], gpus: Sequence[GPU]) -> Iterator[list[Floor]]:
    """Yield the floors of each call, one per GPU."""
    from tilewright.workbench.bench.case_runner import cost_of

    for case in cases:
        for direction in directions:
            cost = cost_of(op, case, direction)
            if cost.bytes:
                yield [Floor(case, direction, gpu, cost) for gpu in gpus]


def _table(op: str, groups: Sequence[Sequence[Floor]], gpus: Sequence[GPU], prices: dict[str, float]) -> Table:
    where = gpus[0].name if len(gpus) == 1 else f"{len(gpus)} GPUs"
    numbers = ("read", "written", "floor (us)", *(PRICE_COLUMNS if prices else ()))
    left = ("case", "direction", *(("gpu",) if len(gpus) > 1 else ()))
    shown = table(*left, right=numbers, last=("bound by",), title=f"{op}: minimum time on {where}")
    for group in groups:
        for number, one in enumerate(group):
            call = (f"{one.case} {one.case.dtype}", one.direction) if not number else ("", "")
            moved = (size(one.cost.read), size(one.cost.written)) if not number else ("", "")
            us = NOT_AVAILABLE if one.us is None else digits(one.us)
            name = (one.gpu.name,) if len(gpus) > 1 else ()
            shown.add_row(*call, *name, *moved, us, *price_cells(prices, one.gpu.name, one.us), one.bound_by)
    return shown
