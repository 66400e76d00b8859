"""What a reader wants of a timing record, computed once for every kind of table and page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright import hardware, record
from tilewright.cost import DIRECTIONS, Cost

BETWEEN_RUNS = 0.02  # by which two runs may differ, whatever the intervals within each say
Interval = tuple[float, float]


@dataclass(frozen=True)
class TimingRow:
    """One kernel on one case."""

    op: str
    point: dict[str, Any]  # the case: sizes and modes by name
    dtype: str
    direction: str
    kernel: str
    gpu: str
    date: str
    verdict: str
    reason: str
    cost: Cost
    rates: dict[str, float]  # the ceilings: measured where they were, by datasheet elsewhere
    us: float | None
    interval_us: Interval | None  # 95 % of the median
    is_torchs: bool  # the call goes to torch
    binds: str  # the unit whose ceiling is the floor
    share: float | None  # of that ceiling
    against: str | None  # the kernel that `ratio` is held against
    ratio: float | None  # its time over this one's
    ratio_interval: Interval | None
    host_us: float | None
    extra_bytes: int | None  # of memory at the peak, beyond inputs and results
    calls: int  # in a sample; more than one: back to back
    throttled: tuple[str, ...]  # why the GPU held itself back
    is_baseline: bool
    is_stale: bool
    place: str = ""  # wins, or ties with others: their intervals overlap that of the fastest
    loses_to: TimingRow | None = field(
        default=None, repr=False
    )  # of the best that is no baseline: the baseline that wins

    @property
    def case(self) -> str:
        return record.spelled(self.point)

    @property
    def arithmetic(self) -> str | None:
        """The unit of arithmetic that its operations take the longest on; None where none are counted."""
        seconds = {u: amount / self.rates.get(u, 1.0) for u, amount in self.cost.flops.items() if amount}
        return max(seconds, key=seconds.__getitem__) if seconds and self.cost.bytes and self.us else None

    @property
    def intensity(self) -> float:
        """Operations of that unit for each byte that must move."""
        return self.cost.flops[self.arithmetic or ""] / self.cost.bytes

    @property
    def per_second(self) -> float:
        """Operations of that unit in a second."""
        return self.cost.flops[self.arithmetic or ""] / (self.us or 0) * 1e6

    @property
    def rate(self) -> str:
        """GB/s or TFLOP/s of the work the Cost counts."""
        if not self.us:
            return ""
        if self.binds in self.cost.flops:
            return f"{self.cost.flops[self.binds] / self.us / 1e6:.0f} TFLOP/s"
        return f"{self.cost.bytes / self.us / 1e3:.0f} GB/s"


def timing_rows(records: list[dict[str, Any]], *, sized: bool = False) -> Iterator[TimingRow]:
    """One row a record: cases in the order they were first recorded, forward before backward, fastest first. Of bench
    cases or, if `sized`, of those that differ in size alone."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        if r.get("sized", False) != sized:
            continue
        key = (DIRECTIONS.index(r["direction"]), r["device"]["gpu"], r["op"], r["dtype"], str(r["case"]))
        together.setdefault(key, []).append(r)
    for key in sorted(together, key=lambda key: key[0]):
        yield from _placed(sorted(map(_row, together[key]), key=lambda row: row.us or math.inf))


def _row(r: dict[str, Any]) -> TimingRow:
    cost = Cost(**r["cost"])
    rates = hardware.rates(r["ceilings"], r["device"]["gpu"])
    unit, floor = cost.floor(rates)
    us, against = r["median_us"], r["against"] or {}
    return TimingRow(
        op=r["op"],
        point=r["case"],
        dtype=r["dtype"],
        direction=r["direction"],
        kernel=r["kernel"],
        gpu=r["device"]["gpu"],
        date=r["date"],
        verdict=r["verdict"],
        reason=r["reason"],
        cost=cost,
        rates=rates,
        us=us,
        interval_us=_pair(r["interval_us"]),
        is_torchs=r.get("is_torchs", False),
        binds=unit,
        share=floor * 1e6 / us if us else None,
        against=against.get("kernel"),
        ratio=against.get("ratio"),
        ratio_interval=_pair(against.get("interval")),
        host_us=r["host_us"],
        extra_bytes=r["extra_bytes"],
        calls=r["calls"],
        throttled=tuple(r["state"].get("throttled", ())),
        is_baseline=r["is_baseline"],
        is_stale=record.is_stale(r),
    )


def _pair(values: list[float] | None) -> Interval | None:
    return (values[0], values[1]) if values else None


def _placed(by_time: list[TimingRow]) -> Iterator[TimingRow]:
    """The rows of one case with who wins, who ties, and where the best of ours loses."""
    fastest = by_time[0]
    is_sure = bool(fastest.us and fastest.interval_us)  # timings of version 1 do not say how sure they are
    first = [row for row in by_time if row is fastest or _overlap(row, fastest)] if is_sure else []
    own = next((row for row in by_time if row.us and not row.is_baseline), None)
    for row in by_time:
        place = ("ties" if len(first) > 1 else "wins") if row in first else ""
        loses = row is own and fastest.is_baseline and not place and bool(fastest.us)
        yield replace(row, place=place, loses_to=fastest if loses else None)


def _overlap(row: TimingRow, fastest: TimingRow) -> bool:
    mine, best = row.interval_us, fastest.interval_us
    if not mine or not best:
        return False
    apart = 0.0 if row.rates == fastest.rates else BETWEEN_RUNS  # the ceilings were measured once a run
    return mine[0] <= best[1] * (1 + apart)
