"""What a reader wants of a timing record, computed once for every kind of table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright import hardware, record
from tilewright.spec import Cost


@dataclass(frozen=True)
class Row:
    """One kernel on one case."""

    op: str
    case: str
    dtype: str
    direction: str
    kernel: str
    verdict: str
    reason: str
    us: float | None
    rate: str  # GB/s or TFLOP/s of the work the Cost counts
    share: float | None  # of the ceiling that binds
    binds: str
    against_eager: float | None  # eager's time over this one's
    is_fastest: bool
    is_stale: bool


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    """One row a record: cases in the order they were first recorded, forward before backward, fastest first."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        key = (r["direction"] == "backward", r["device"]["gpu"], r["op"], r["dtype"], str(r["case"]))
        together.setdefault(key, []).append(r)
    for key in sorted(together, key=lambda key: key[0]):
        by_time = sorted(together[key], key=lambda r: r["median_us"] or math.inf)
        times = {r["kernel"]: r["median_us"] for r in by_time if r["median_us"]}
        for r in by_time:
            yield _row(r, times.get("eager"), is_fastest=r is by_time[0] and bool(times))


def _row(r: dict[str, Any], eager_us: float | None, is_fastest: bool) -> Row:
    cost = Cost(**r["cost"])
    unit, floor = cost.floor(hardware.rates(r["ceilings"], r["device"]["gpu"]))
    us = r["median_us"]
    return Row(
        op=r["op"],
        case=",".join(f"{name}={value}" for name, value in r["case"].items()),
        dtype=r["dtype"],
        direction=r["direction"],
        kernel=r["kernel"],
        verdict=r["verdict"],
        reason=r["reason"],
        us=us,
        rate=_rate(cost, unit, us) if us else "",
        share=floor * 1e6 / us if us else None,
        binds=unit,
        against_eager=eager_us / us if us and eager_us else None,
        is_fastest=is_fastest,
        is_stale=record.is_stale(r),
    )


def _rate(cost: Cost, unit: str, us: float) -> str:
    if unit in cost.flops:
        return f"{cost.flops[unit] / us / 1e6:.0f} TFLOP/s"
    return f"{cost.bytes / us / 1e3:.0f} GB/s"
