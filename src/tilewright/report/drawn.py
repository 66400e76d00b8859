"""Results of `bench --random`: our public function beside the best of torch and the peers on each drawn case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tilewright import hardware
from tilewright.cost import BANDWIDTHS, Cost
from tilewright.record import is_stale, spelled
from tilewright.report.formatting import digits, percent
from tilewright.source import PUBLIC, op_files

LOSS = 1.02  # our time / the best other time, from which a case counts as lost
CAPTURED_LOSS = 1.05  # the same for small cases in a CUDA graph
LARGE_LOSS = 1.10  # that no case should reach
WORST = 10
LARGE = 64 * 10**6  # bytes moved from which a case should reach its share of the ceiling
MAX_HOST = 1.5  # our host time over eager's, at most
HOST_GOAL = 0.95  # the share of calls that should meet it
ALL = "all operations"


@dataclass(frozen=True)
class DrawnResult:
    """One drawn case in one direction: our record, those of the baselines, the fastest first."""

    ours: Mapping[str, Any]
    baselines: Sequence[Mapping[str, Any]]

    @property
    def best(self) -> Mapping[str, Any]:
        return self.baselines[0]

    @property
    def case(self) -> str:
        return f"{spelled(self.ours['case'])} {self.ours['dtype']} {self.ours['layout']}"

    @property
    def slowdown(self) -> float:
        """Return our time over that of the best baseline."""
        return self.ours["median_us"] / self.best["median_us"]

    @property
    def is_lost(self) -> bool:
        return self.slowdown > (CAPTURED_LOSS if self.ours.get("captured") else LOSS)

    @property
    def is_lost_in_a_loop(self) -> bool:
        """Return whether the case is lost in a loop of calls, each of which takes the host or the device longer."""
        return _call_us(self.ours) > LOSS * min(map(_call_us, self.baselines))

    @property
    def is_large(self) -> bool:
        return Cost(**self.ours["cost"]).bytes >= LARGE

    @property
    def share(self) -> float | None:
        """Return the share of the memory ceiling that we reach on a large case; None for other cases.

        An expanded tensor has fewer bytes than elements, so that its minimum is not known.
        """
        cost = Cost(**self.ours["cost"])
        unit, floor = cost.floor(hardware.rates(self.ours["ceilings"], self.ours["device"]["gpu"]))
        if not self.is_large or unit not in BANDWIDTHS or self.ours["layout"] == "expanded":
            return None
        return floor * 1e6 / self.ours["median_us"]

    @property
    def host_ratio(self) -> float | None:
        """Return our host time over eager's; None in a CUDA graph, whose calls take none."""
        eager = next((r for r in self.baselines if r["kernel"] == "eager"), None)
        if eager is None or not eager["host_us"] or self.ours.get("captured"):
            return None
        return self.ours["host_us"] / eager["host_us"]


def _call_us(r: Mapping[str, Any]) -> float:
    return max(r["median_us"], r["host_us"] or 0.0)


@dataclass(frozen=True)
class Reach:
    """The shares of the ceiling of large cases of one kind, and the share that each should have."""

    kind: str
    goal: float
    shares: list[float]

    def sentence(self) -> str:
        """Return the shares in one line."""
        middle, lowest = percent(median(self.shares)), percent(min(self.shares))
        missed = sum(share < self.goal for share in self.shares)
        return (
            f"{self.kind}: {len(self.shares)} of at least {LARGE // 10**6} MB reach {middle} % of the ceiling in the "
            f"median, {lowest} % at least; {missed} miss {percent(self.goal)} %"
        )


@dataclass(frozen=True)
class Summary:
    """The drawn cases of one operation, or of all, on one GPU."""

    op: str
    gpu: str
    device: str
    seeds: tuple[int, ...]
    results: list[DrawnResult]  # worst first
    untimed: int  # cases without a time of ours, or of any baseline
    stale: int
    captured: bool = False  # in CUDA graphs
    seconds: Counter[str] = field(default_factory=Counter)  # that all cases took, by phase

    @property
    def title(self) -> str:
        return f"{self.op} on {self.device}{' in CUDA graphs' if self.captured else ''}"

    @property
    def lost(self) -> int:
        return sum(one.is_lost for one in self.results)

    @property
    def lost_much(self) -> int:
        return sum(one.slowdown > LARGE_LOSS for one in self.results)

    @property
    def geometric_mean(self) -> float:
        """Return the geometric mean of the best baseline's time over ours: above 1, we are faster."""
        return math.exp(-sum(math.log(one.slowdown) for one in self.results) / len(self.results))

    @property
    def reaches(self) -> list[Reach]:
        """Return the shares of the ceiling by kind of case."""
        found: dict[tuple[str, float], list[float]] = {}
        for one in self.results:
            if (share := one.share) is not None and (kind := _kind(one.ours)):
                found.setdefault(kind, []).append(share)
        return [Reach(kind, goal, shares) for (kind, goal), shares in sorted(found.items())]

    @property
    def host_shares(self) -> dict[str, float]:
        """Return the share of calls whose host time is at most MAX_HOST of eager's, by direction."""
        found: dict[str, list[bool]] = {}
        for one in self.results:
            if (ratio := one.host_ratio) is not None:
                found.setdefault(one.ours["direction"], []).append(ratio <= MAX_HOST)
        return {direction: sum(few) / len(few) for direction, few in found.items()}

    def sentence(self) -> str:
        """Return the summary in one line."""
        if not self.results:
            return f"no case of {self.op} has a time of both {PUBLIC} and a baseline"
        share, loss = percent(self.lost / len(self.results)), CAPTURED_LOSS if self.captured else LOSS
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        return (
            f"{self.lost} of {len(self.results)} cases ({share} %) lose more than {_percent_above(loss)} % to the best "
            f"of torch and the peers, {self.lost_much} more than {_percent_above(LARGE_LOSS)} %; geometric mean of the "
            f"speedups {self.geometric_mean:.3f} ({seeds})"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "gpu": self.gpu,
            "captured": self.captured,
            "seeds": self.seeds,
            "cases": len(self.results),
            "lost": self.lost,
            "lost_much": self.lost_much,
            "geometric_mean": self.geometric_mean if self.results else None,
            "ceiling": [{"kind": reach.kind, "goal": reach.goal, "shares": reach.shares} for reach in self.reaches],
            "host": self.host_shares,
            "untimed": self.untimed,
            "seconds": self.seconds,
        }


def _percent_above(ratio: float) -> int:
    return round(100 * (ratio - 1))


def _kind(r: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the kind of a large case and the share of the ceiling that it should reach."""
    if r["direction"] == "forward":
        return ("forward, aligned rows", 0.92) if r["aligned"] else ("forward, other rows", 0.80)
    if r["direction"] == "backward":
        is_norm = op_files()[r["op"]].parent.name == "norm" if r["op"] in op_files() else False
        return ("backward, norms", 0.85) if is_norm else ("backward", 0.88)
    return None


def summaries(records: Iterable[dict[str, Any]]) -> list[Summary]:
    """Return the summaries of random records: of each operation and, if there are several, of all.

    Each is of one GPU, and of captured calls or others.
    """
    groups: dict[tuple[str, bool, str], dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for r in records:
        if r["kind"] == "random":
            call = (r["op"], spelled(r["case"]), r["dtype"], r["layout"], r["direction"])
            for op in (ALL, r["op"]):
                key = r["device"]["gpu"], r.get("captured", False), op
                groups.setdefault(key, {}).setdefault(call, []).append(r)
    return [
        _summary(op, gpu, captured, cases)
        for (gpu, captured, op), cases in groups.items()
        if op != ALL or _is_several(cases)
    ]


def _is_several(cases: Mapping[tuple[Any, ...], Any]) -> bool:
    return len({call[0] for call in cases}) > 1


def _summary(op: str, gpu: str, captured: bool, cases: dict[tuple[Any, ...], list[dict[str, Any]]]) -> Summary:
    every = [r for case in cases.values() for r in case]
    found = []
    seconds: Counter[str] = Counter()
    for case in cases.values():
        timed = [r for r in case if r["median_us"]]
        ours = next((r for r in timed if r["kernel"] == PUBLIC), None)
        baselines = sorted((r for r in timed if r["is_baseline"]), key=lambda r: r["median_us"])
        if ours and baselines:
            found.append(DrawnResult(ours, baselines))
        seconds.update(max((r["seconds"] for r in case), key=lambda spent: sum(spent.values())))
    found.sort(key=lambda one: -one.slowdown)
    stale = sum(is_stale(r) for r in every if r["kernel"] == PUBLIC)
    seeds = tuple(sorted({r["seed"] for r in every}))
    untimed = len(cases) - len(found)
    return Summary(op, gpu, every[0]["device"]["name"], seeds, found, untimed, stale, captured, seconds)


def notes(summary: Summary) -> Iterator[str]:
    """Yield what a reader should know beside the sentence."""
    large = [one for one in summary.results if one.is_large]
    small = [one for one in summary.results if not one.is_large]
    if large:
        lost, much = sum(one.is_lost for one in large), sum(one.slowdown > LARGE_LOSS for one in large)
        yield (
            f"at least {LARGE // 10**6} MB: {lost} of {len(large)} cases lose more than {_percent_above(LOSS)} %, "
            f"{much} more than {_percent_above(LARGE_LOSS)} %"
        )
    if small and not summary.captured:
        device, loop = sum(one.is_lost for one in small), sum(one.is_lost_in_a_loop for one in small)
        yield (
            f"smaller: {device} of {len(small)} lose on the device, {loop} in a loop of calls, where a call takes the "
            "host's time if that is longer"
        )
    yield from (reach.sentence() for reach in summary.reaches)
    if shares := summary.host_shares:
        parts = [f"{percent(share)} % of {direction} calls" for direction, share in shares.items()]
        yield f"host time at most {MAX_HOST} of eager's in {', '.join(parts)}; the goal is {percent(HOST_GOAL)} %"
    if summary.untimed:
        yield f"{summary.untimed} cases were not timed: too large, or a kernel was not correct"
    if summary.stale:
        yield f"{summary.stale} results are stale: the source changed after the measurement"
    if summary.seconds:
        parts = [f"{phase} {seconds:.0f}" for phase, seconds in summary.seconds.most_common()]
        yield f"{sum(summary.seconds.values()):.0f} s: {', '.join(parts)}"


def row(one: DrawnResult) -> tuple[str, ...]:
    """Return the cells of a table: operation, case, direction, path, best baseline, our time, its time, the ratio."""
    times = digits(one.ours["median_us"]), digits(one.best["median_us"])
    return (
        *(one.ours["op"], one.case, one.ours["direction"], one.ours.get("path", ""), one.best["kernel"]),
        *(*times, f"{one.slowdown:.3f}"),
    )


def line(summary: Summary) -> tuple[str, ...]:
    """Return the cells of an operation among several: cases, losses, the worst ratio, the geometric mean."""
    worst = summary.results[0].slowdown if summary.results else None
    mean = f"{summary.geometric_mean:.3f}" if summary.results else ""
    counts = len(summary.results), summary.lost, summary.lost_much
    return summary.op, *map(str, counts), f"{worst:.3f}" if worst else "", mean
