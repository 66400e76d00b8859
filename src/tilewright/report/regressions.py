"""Calls of the public functions that are slower than torch, and their host time, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from tilewright import record, source
from tilewright.report.formatting import digits, op_label, provenance
from tilewright.report.formatting import table as markdown_table
from tilewright.report.timings import BETWEEN_RUNS, TimingRow, timing_rows

BASELINES = ("eager", "compile")
HOST_GOAL = 1.5  # times the host time of torch's own call
Call = tuple[TimingRow, dict[str, TimingRow]]  # the public function, and the same call by each baseline


def table(records: list[dict[str, Any]]) -> str:
    """Render the calls that are slower and run our kernels, over bench cases and sizes; then the host times."""
    calls = [*_calls(records)]
    slower = [(ours, baselines) for ours, baselines in calls if _ratio(ours, baselines) > 1 + BETWEEN_RUNS]
    own = [(ours, baselines) for ours, baselines in slower if not ours.runs_torch]
    lines = []
    for ours, baselines in own:
        cells = [digits(row.us) if row else "" for row in (*map(baselines.get, BASELINES), ours)]
        case = f"{ours.case} {ours.dtype}"
        lines.append((op_label(ours.op, ours.direction), case, *cells, f"{_ratio(ours, baselines):.3f}"))
    columns = ("op", "case", ">eager (us)", ">compile (us)", ">Tilewright (us)", ">time / best of torch")
    sentences = [
        f"{len(own)} of {len(calls)} calls run our kernels and are more than {BETWEEN_RUNS:.0%} slower than torch.",
        f"{len(slower) - len(own)} more run torch and are slower than torch.compile.",
    ]
    for name, directions in (("Forward", ("forward",)), ("Backward, or forward and backward", ("backward", "both"))):
        sentences += _host(name, [call for call in calls if call[0].direction in directions])
    users = [r for r in records if r["kernel"] == source.PUBLIC and not record.is_stale(r)]
    where = provenance("Measured on", users, "torch", "triton")
    return "\n".join([markdown_table(columns, lines), "", *sentences, "", *where]) + "\n"


def _calls(records: list[dict[str, Any]]) -> Iterator[Call]:
    """Yield the public function's call and the baselines' of every case that has fresh timings of both."""
    for sized in (False, True):
        fresh = [row for row in timing_rows(records, sized=sized) if row.us and not row.is_stale]
        for _, group in groupby(fresh, key=lambda row: (row.gpu, row.op, row.direction, row.case, row.dtype)):
            timed = {row.kernel: row for row in group}
            baselines = {name: timed[name] for name in BASELINES if name in timed}
            if baselines and source.PUBLIC in timed:
                yield timed[source.PUBLIC], baselines


def _ratio(ours: TimingRow, baselines: dict[str, TimingRow]) -> float:
    return (ours.us or 0) / min(row.us or 0 for row in baselines.values())


def _host(name: str, calls: Sequence[Call]) -> list[str]:
    pairs = [(ours.host_us, base["eager"].host_us) for ours, base in calls if "eager" in base and not ours.runs_torch]
    ratios = [ours / eager for ours, eager in pairs if ours and eager]
    if not ratios:
        return []
    within = sum(ratio <= HOST_GOAL for ratio in ratios) / len(ratios)
    return [
        f"{name}: the host time of calls that run our kernels is {median(ratios):.2f} times eager's (median of "
        f"{len(ratios)}), at most {HOST_GOAL} times in {within:.0%} of them, {max(ratios):.1f} times in the worst."
    ]
