"""How well `explain` predicts times and bottlenecks, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from tilewright.counters import Counters
from tilewright.record import is_stale, spelled
from tilewright.report.formatting import op_label, provenance, table

Record = dict[str, Any]
LATENCY_BOUND = ("latency", "start", "atomics")  # predicted bottlenecks that ncu calls latency: no unit is busy


def predictions(records: Sequence[Record]) -> str:
    """Render the ratio of predicted to measured time per op, kernel and direction."""
    columns = ("op", "kernel", ">calls", ">predicted / measured", ">lowest", ">highest", "notes")

    def group(r: Record) -> tuple[str, str, str]:
        return r["op"], r["kernel"], r["direction"]

    lines = []
    for (op, kernel, direction), together in groupby(sorted(records, key=group), key=group):
        found = list(together)
        ratios = [ratio(r) for r in found]
        old = sum(map(is_of_older_code, found))
        notes = f"{old} timings of older code" if old else ""
        numbers = [f"{value:.2f}" for value in (geometric_mean(ratios), min(ratios), max(ratios))]
        lines.append((op_label(op, direction), kernel, str(len(found)), *numbers, notes))
    where = provenance("Predicted, without a GPU, for", records)
    return "\n".join([table(columns, lines), "", *(f"{line}  " for line in means(records)), "", *where]) + "\n"


def bottlenecks(records: Sequence[Record]) -> str:
    """Render how often the predicted bottleneck is ncu's, over calls that have both, then every disagreement."""
    predicted = {_call(r): r for r in records if r["kind"] == "prediction"}
    counted = sorted((r for r in records if r["kind"] == "counters" and _call(r) in predicted), key=_call)
    if not counted:
        return "No records yet.\n"
    lines, disagreements, agreed = [], [], 0
    for (op, kernel, direction), together in groupby(counted, key=lambda r: _call(r)[:3]):
        pairs = [(r, Counters.from_record(r), predicted[_call(r)]) for r in together]
        named = [(r, found.bottleneck, found, guess) for r, found, guess in pairs if found and found.bottleneck]
        differ = [one for one in named if not _agree(one[1], one[3]["binds"])]
        agreed += len(named) - len(differ)
        notes = "stale" if any(is_stale(r) for r, *_ in named) else ""
        names = ", ".join(dict.fromkeys(name for _, name, *_ in named))
        counts = (str(len(named)), str(len(named) - len(differ)))
        lines.append((op_label(op, direction), kernel, *counts, names, notes))
        disagreements += [
            f"- {op_label(op, direction)}, {kernel}, {spelled(r['case'])} {r['dtype']}: {name} by ncu "
            f"(memory {found.memory:.0%} busy, SMs {found.sm:.0%}), predicted {guess['binds']}"
            for r, name, found, guess in differ
        ]
    total = agreed + len(disagreements)
    columns = ("op", "kernel", ">calls", ">agree with ncu", "bottleneck by ncu", "notes")
    summary = f"The prediction agrees with ncu in {agreed} of {total} calls, {agreed / max(1, total):.0%}."
    parts = [table(columns, lines), "", summary, *(["", *disagreements] if disagreements else []), ""]
    return "\n".join([*parts, *provenance("Counted by ncu on", counted)]) + "\n"


def _call(r: Record) -> tuple[str, ...]:
    return r["op"], r["kernel"], r["direction"], str(sorted(r["case"].items())), r["dtype"]


def _agree(counted: str, predicted: str) -> bool:
    """Return whether two bottlenecks are the same kind; where memory and SMs are equally busy, either is right."""
    kind = "memory" if predicted == "memory" else "latency" if predicted in LATENCY_BOUND else "compute"
    return kind == counted or (counted == "balanced" and kind != "latency")


def means(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence per group of calls: mean ratio, mean error factor, and coverage of the interval."""
    whole = [r for r in records if r["is_whole"]]
    bound = [r for r in whole if r["memory_bound"]]
    for name, chosen in (
        ("Memory-bound calls", bound),
        ("Memory-bound calls, timings of the current code", [r for r in bound if not is_of_older_code(r)]),
        ("Calls that are not memory-bound", [r for r in whole if not r["memory_bound"]]),
        ("Calls that also run torch kernels, their Triton part alone", [r for r in records if not r["is_whole"]]),
    ):
        if chosen:
            ratios = [ratio(r) for r in chosen]
            factor = geometric_mean(max(one, 1 / one) for one in ratios)
            inside = sum(r["interval_us"][0] <= r["measured"]["us"] <= r["interval_us"][1] for r in chosen)
            yield (
                f"{name} ({len(chosen)}): predicted / measured {geometric_mean(ratios):.2f} (geometric mean), off "
                f"by a factor of {factor:.2f} on average; {inside / len(chosen):.0%} of the measured times are within "
                "the predicted interval."
            )


def ratio(r: Record) -> float:
    return r["predicted_us"] / r["measured"]["us"]


def is_of_older_code(r: Record) -> bool:
    """Return whether the code that was timed is not the code whose time was predicted."""
    return r["measured"]["source"] != r["source"]


def geometric_mean(ratios: Iterable[float]) -> float:
    logs = [math.log(one) for one in ratios]
    return math.exp(sum(logs) / len(logs))
