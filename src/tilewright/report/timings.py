"""Timing records as rows with derived figures for every table and page: share of the ceiling, rates, who wins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright import hardware, record
from tilewright.cost import DIRECTIONS, Cost

BETWEEN_RUNS = 0.02  # two runs may differ by this much, whatever the intervals within each are
Interval = tuple[float, float]


@dataclass(frozen=True)
class TimingRow:
    """One kernel on one case."""

    op: str
    parameters: dict[str, Any]  # the case's sizes and modes
    dtype: str
    direction: str
    kernel: str
    gpu: str
    date: str
    verdict: str
    reason: str
    cost: Cost
    rates: dict[str, float]  # ceilings: measured, or from the datasheet where none was measured
    us: float | None
    interval_us: Interval | None  # 95 % confidence interval of the median
    runs_torch: bool
    bound_by: str  # the unit that needs the most time at its ceiling
    share: float | None  # the minimum time at the ceiling over the measured time
    speedup: float | None
    speedup_over: str | None  # the kernel whose time is the numerator of `speedup`
    speedup_interval: Interval | None
    host_us: float | None
    extra_bytes: int | None  # peak memory beyond inputs and results
    calls: int  # per sample; if more than one, they run back to back
    throttled: tuple[str, ...]  # reasons the driver gave for lower clocks
    is_baseline: bool
    is_stale: bool
    run: str  # equal for timings of one run
    place: str = ""  # "wins", or "ties" if the intervals of several kernels overlap that of the fastest
    loses_to: TimingRow | None = field(default=None, repr=False)  # set on our fastest kernel where a baseline wins

    @property
    def case(self) -> str:
        return record.spelled(self.parameters)

    @property
    def arithmetic(self) -> str | None:
        """The arithmetic unit that needs the most time for the case; None if the cost counts no operations."""
        seconds = {u: amount / self.rates.get(u, 1.0) for u, amount in self.cost.flops.items() if amount}
        return max(seconds, key=seconds.__getitem__) if seconds and self.cost.bytes and self.us else None

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations of that unit per byte of minimum traffic."""
        return self.cost.flops[self.arithmetic or ""] / self.cost.bytes

    @property
    def per_second(self) -> float:
        """Operations of that unit per second."""
        return self.cost.flops[self.arithmetic or ""] / (self.us or 0) * 1e6

    @property
    def is_compute_bound(self) -> bool:
        return self.bound_by in self.cost.flops

    @property
    def achieved(self) -> float | None:
        """GB/s of the minimum traffic, or TFLOP/s if the case is compute-bound."""
        if not self.us or not self.cost:
            return None
        return (
            self.cost.flops[self.bound_by] / self.us / 1e6 if self.is_compute_bound else self.cost.bytes / self.us / 1e3
        )

    @property
    def rate_unit(self) -> str:
        return "TFLOP/s" if self.is_compute_bound else "GB/s"


def timing_rows(records: list[dict[str, Any]], *, sized: bool = False) -> Iterator[TimingRow]:
    """Yield a row per timing record: cases in recorded order, forward before backward, the fastest kernel first.

    `sized` selects the records of `bench --sizes` instead of those of the bench cases.
    """
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
        parameters=r["case"],
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
        runs_torch=r.get("is_torchs", False),
        bound_by=unit,
        share=floor * 1e6 / us if us and cost else None,
        speedup=against.get("ratio"),
        speedup_over=against.get("kernel"),
        speedup_interval=_pair(against.get("interval")),
        host_us=r["host_us"],
        extra_bytes=r["extra_bytes"],
        calls=r["calls"],
        throttled=tuple(r["state"].get("throttled", ())),
        is_baseline=r["is_baseline"],
        is_stale=record.is_stale(r),
        run=r.get("run") or str(sorted(rates.items())),  # older records: ceilings were measured in every run
    )


def _pair(values: list[float] | None) -> Interval | None:
    return (values[0], values[1]) if values else None


def _placed(by_time: list[TimingRow]) -> Iterator[TimingRow]:
    """Yield the rows of one case with winners, ties, and the baseline that beats our fastest kernel."""
    fastest = by_time[0]
    has_interval = bool(fastest.us and fastest.interval_us)  # timings of schema 1 have none
    first = [row for row in by_time if row is fastest or _overlap(row, fastest)] if has_interval else []
    ours = next((row for row in by_time if row.us and not row.is_baseline), None)
    for row in by_time:
        place = ("ties" if len(first) > 1 else "wins") if row in first else ""
        loses = row is ours and fastest.is_baseline and not place and bool(fastest.us)
        yield replace(row, place=place, loses_to=fastest if loses else None)


def _overlap(row: TimingRow, fastest: TimingRow) -> bool:
    if not row.interval_us or not fastest.interval_us:
        return False
    margin = 0.0 if row.run == fastest.run else BETWEEN_RUNS
    return row.interval_us[0] <= fastest.interval_us[1] * (1 + margin)
