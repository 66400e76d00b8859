"""Where a user's call takes longer than what he had, and how long it keeps the host: records as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from tilewright import record, source
from tilewright.report.formatting import provenance
from tilewright.report.timings import BETWEEN_RUNS, TimingRow, timing_rows

HAD = ("eager", "compile")
HOST = 1.5  # times what torch's own call keeps the host: the goal
Call = tuple[TimingRow, dict[str, TimingRow]]  # a user's, and the same by each of HAD


def table(records: list[dict[str, Any]]) -> str:
    """A line for each that is slower and ours, bench cases and sizes, with the number of all; then the host's time."""
    calls = [*_calls(records)]
    slower = [(ours, had) for ours, had in calls if _ratio(ours, had) > 1 + BETWEEN_RUNS]
    mine = [(ours, had) for ours, had in slower if not ours.is_torchs]
    lines = ["| op | case | eager | compile | tilewright | of the best |", "|---|---|--:|--:|--:|--:|"]
    for ours, had in mine:
        cells = [f"{row.us:.2f} us" if row else "" for row in (*map(had.get, HAD), ours)]
        way = "" if ours.direction == "forward" else f" {ours.direction}"
        lines.append(f"| {ours.op}{way} | {ours.case} {ours.dtype} | {' | '.join(cells)} | {_ratio(ours, had):.3f} |")
    lines += ["", f"These {len(mine)} of {len(calls)} calls are slower by more than {BETWEEN_RUNS:.0%} and ours."]
    lines.append(f"{len(slower) - len(mine)} more are slower than torch.compile's, and go to torch.")
    for what, ways in (("Forward", ("forward",)), ("Backward, or both at once", ("backward", "both"))):
        lines += _host(what, [call for call in calls if call[0].direction in ways])
    users = [r for r in records if r["kernel"] == source.PUBLIC and not record.is_stale(r)]
    return "\n".join([*lines, "", *provenance("Measured on", users, "torch", "triton")]) + "\n"


def _calls(records: list[dict[str, Any]]) -> Iterator[Call]:
    """Of the present code."""
    for sized in (False, True):
        fresh = [row for row in timing_rows(records, sized=sized) if row.us and not row.is_stale]
        for _, group in groupby(fresh, key=lambda row: (row.gpu, row.op, row.direction, row.case, row.dtype)):
            timed = {row.kernel: row for row in group}
            had = {name: timed[name] for name in HAD if name in timed}
            if had and source.PUBLIC in timed:
                yield timed[source.PUBLIC], had


def _ratio(ours: TimingRow, had: dict[str, TimingRow]) -> float:
    return (ours.us or 0) / min(row.us or 0 for row in had.values())


def _host(what: str, calls: Sequence[Call]) -> list[str]:
    eager = [(ours.host_us, had["eager"].host_us) for ours, had in calls if "eager" in had and not ours.is_torchs]
    ratios = [mine / torchs for mine, torchs in eager if mine and torchs]
    if not ratios:
        return []
    within = sum(ratio <= HOST for ratio in ratios) / len(ratios)
    return [
        f"{what}, calls that take our kernels keep the host {median(ratios):.2f} times as long as torch's own in the "
        f"median of {len(ratios)}, no more than {HOST} times in {within:.0%}, {max(ratios):.1f} times at most."
    ]
