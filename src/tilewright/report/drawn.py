"""Results of `bench --random`: our public function beside the best of torch and the peers on each drawn case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.record import is_stale, spelled
from tilewright.report.formatting import digits, percent
from tilewright.source import PUBLIC

LOSS = 1.02  # our time / the best other time, from which on a case counts as lost
WORST = 10


@dataclass(frozen=True)
class DrawnResult:
    """One drawn case in one direction: our record, and the fastest baseline's."""

    ours: Mapping[str, Any]
    best: Mapping[str, Any]

    @property
    def case(self) -> str:
        return f"{spelled(self.ours['case'])} {self.ours['dtype']} {self.ours['layout']}"

    @property
    def slowdown(self) -> float:
        """Return our time over that of the best baseline."""
        return self.ours["median_us"] / self.best["median_us"]

    @property
    def is_lost(self) -> bool:
        return self.slowdown > LOSS


@dataclass(frozen=True)
class Summary:
    """The drawn cases of one operation on one GPU."""

    op: str
    gpu: str
    device: str
    seeds: tuple[int, ...]
    results: list[DrawnResult]  # worst first
    untimed: int  # cases without a time of ours, or of any baseline
    stale: int

    @property
    def lost(self) -> int:
        return sum(one.is_lost for one in self.results)

    @property
    def geometric_mean(self) -> float:
        """Return the geometric mean of the best baseline's time over ours: above 1, we are faster."""
        return math.exp(-sum(math.log(one.slowdown) for one in self.results) / len(self.results))

    def sentence(self) -> str:
        """Return the summary in one line."""
        if not self.results:
            return f"no case of {self.op} has a time of both {PUBLIC} and a baseline"
        share = percent(self.lost / len(self.results))
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        return (
            f"{self.lost} of {len(self.results)} cases ({share} %) lose more than {round(100 * (LOSS - 1))} % to the "
            f"best of torch and the peers; geometric mean of the speedups {self.geometric_mean:.3f} ({seeds})"
        )


def summaries(records: Iterable[dict[str, Any]]) -> list[Summary]:
    """Return a summary for each operation and GPU among records of kind "random"."""
    groups: dict[tuple[str, str], dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for r in records:
        if r["kind"] == "random":
            call = (spelled(r["case"]), r["dtype"], r["layout"], r["direction"])
            groups.setdefault((r["op"], r["device"]["gpu"]), {}).setdefault(call, []).append(r)
    return [_summary(op, gpu, cases) for (op, gpu), cases in groups.items()]


def _summary(op: str, gpu: str, cases: dict[tuple[Any, ...], list[dict[str, Any]]]) -> Summary:
    every = [r for case in cases.values() for r in case]
    found = []
    for case in cases.values():
        timed = [r for r in case if r["median_us"]]
        ours = next((r for r in timed if r["kernel"] == PUBLIC), None)
        best = min((r for r in timed if r["is_baseline"]), key=lambda r: r["median_us"], default=None)
        if ours and best:
            found.append(DrawnResult(ours, best))
    found.sort(key=lambda one: -one.slowdown)
    stale = sum(is_stale(r) for r in every if r["kernel"] == PUBLIC)
    seeds = tuple(sorted({r["seed"] for r in every}))
    return Summary(op, gpu, every[0]["device"]["name"], seeds, found, len(cases) - len(found), stale)


def row(one: DrawnResult) -> tuple[str, ...]:
    """Return the cells of a table: case, direction, our time, the best baseline and its time, and the ratio."""
    times = digits(one.ours["median_us"]), one.best["kernel"], digits(one.best["median_us"])
    return one.case, one.ours["direction"], *times, f"{one.slowdown:.3f}"
