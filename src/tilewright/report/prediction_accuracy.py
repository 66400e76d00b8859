"""How near predictions came, and what mending a flaw brought: records as Markdown, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from tilewright.counters import Counters
from tilewright.record import is_stale, spelled
from tilewright.report.formatting import provenance

Record = dict[str, Any]


def predictions(records: Sequence[Record]) -> str:
    """A line for each op, kernel and direction: predicted over measured."""
    lines = ["| op | kernel | calls | predicted over measured | lowest | highest | |", "|---|---|--:|--:|--:|--:|---|"]

    def group(r: Record) -> tuple[str, str, str]:
        return r["op"], r["kernel"], r["direction"]

    for (op, kernel, direction), together in groupby(sorted(records, key=group), key=group):
        found = list(together)
        ratios = [ratio(r) for r in found]
        way = "" if direction == "forward" else f" {direction}"
        old = sum(map(is_of_older_code, found))
        stale = f"{old} timings of older code" if old else ""
        numbers = " | ".join(f"{x:.2f}" for x in (geometric_mean(ratios), min(ratios), max(ratios)))
        lines.append(f"| {op}{way} | {kernel} | {len(found)} | {numbers} | {stale} |")
    where = dict.fromkeys(f"Predicted for {r['device']['name']} without it, {r['date'][:10]}." for r in records)
    return "\n".join([*lines, "", *(f"{line}  " for line in means(records)), "", *where]) + "\n"


WAITING = ("latency", "start", "atomics")  # what ncu calls latency: no unit is busy


def bottlenecks(records: Sequence[Record]) -> str:
    """A line for each op, kernel and direction, of its calls that were both counted and predicted; then each call that
    is predicted to be bound by something else than ncu names."""
    predicted = {_call(r): r for r in records if r["kind"] == "prediction"}
    counted = sorted((r for r in records if r["kind"] == "counters" and _call(r) in predicted), key=_call)
    if not counted:
        return "No records yet.\n"
    lines = ["| op | kernel | calls | named as ncu does | ncu names | |", "|---|---|--:|--:|---|---|"]
    others, agreed = [], 0
    for (op, kernel, direction), together in groupby(counted, key=lambda r: _call(r)[:3]):
        pairs = [(r, Counters.of_record(r), predicted[_call(r)]) for r in together]
        named = [(r, found.binds, found, guess) for r, found, guess in pairs if found and found.binds]
        parted = [pair for pair in named if not _agree(pair[1], pair[3]["binds"])]
        agreed += len(named) - len(parted)
        stale = "stale" if any(is_stale(r) for r, *_ in named) else ""
        names = ", ".join(dict.fromkeys(name for _, name, *_ in named))
        way = "" if direction == "forward" else f" {direction}"
        lines.append(f"| {op}{way} | {kernel} | {len(named)} | {len(named) - len(parted)} | {names} | {stale} |")
        others += [
            f"- {op}{way}, {kernel}, {spelled(r['case'])} {r['dtype']}: ncu names "
            f"{name} (memory {found.memory:.0%} busy, SMs {found.sm:.0%}), predicted: {guess['binds']}"
            for r, name, found, guess in parted
        ]
    total = agreed + len(others)
    share = f"Named as ncu does: {agreed} of {total} calls, {agreed / max(1, total):.0%}."
    where = provenance("Counted by ncu on", counted)
    return "\n".join([*lines, "", share, *(["", *others] if others else []), "", *where]) + "\n"


def _call(r: Record) -> tuple[str, ...]:
    return r["op"], r["kernel"], r["direction"], str(sorted(r["case"].items())), r["dtype"]


def _agree(counted: str, predicted: str) -> bool:
    """Where memory and SMs are equally busy, either is."""
    kind = "memory" if predicted == "memory" else "latency" if predicted in WAITING else "compute"
    return kind == counted or (counted == "balanced" and kind != "latency")


def means(records: Sequence[Record]) -> Iterator[str]:
    """Geometric means of predicted over measured, and of how far the two are apart whichever is larger."""
    whole = [r for r in records if r["is_whole"]]
    bound = [r for r in whole if r["memory_bound"]]
    for what, chosen in (
        ("Bound by memory", bound),
        ("Bound by memory, timings of the present code", [r for r in bound if not is_of_older_code(r)]),
        ("Others", [r for r in whole if not r["memory_bound"]]),
        ("Part of a call, the rest of which is torch's", [r for r in records if not r["is_whole"]]),
    ):
        if chosen:
            ratios = [ratio(r) for r in chosen]
            apart = geometric_mean(max(one, 1 / one) for one in ratios)
            mean = geometric_mean(ratios)
            inside = sum(r["interval_us"][0] <= r["measured"]["us"] <= r["interval_us"][1] for r in chosen)
            yield (
                f"{what}: predicted over measured {mean:.2f}, apart by a factor of {apart:.2f}, {len(chosen)} calls; "
                f"{inside / len(chosen):.0%} measured within the interval."
            )


def ratio(r: Record) -> float:
    return r["predicted_us"] / r["measured"]["us"]


def is_of_older_code(r: Record) -> bool:
    """Whether what was timed is not what was predicted."""
    return r["measured"]["source"] != r["source"]


def geometric_mean(ratios: Iterable[float]) -> float:
    logs = [math.log(one) for one in ratios]
    return math.exp(sum(logs) / len(logs))


def flaws(records: Sequence[Record]) -> str:
    """Each slow kernel beside its mended twin."""
    lines = ["| flaw | named by | slow | mended | speed-up, 95 % | predicted |", "|---|---|--:|--:|--:|--:|"]
    for r in records:
        slow, mended = (f"{median(r[side]):.1f} us" for side in ("slow", "mended"))
        low, high = r["interval"]
        guess = r["predicted_us"]
        predicted = f"{guess['slow'] / guess['mended']:.1f}x" if guess else ""
        stale = ", stale" if is_stale(r) else ""
        lines.append(
            f"| [{r['op']}](../{r['file']}){stale} | {', '.join(r['named'])} | {slow} | {mended} "
            f"| {r['ratio']:.2f}x, {low:.2f} to {high:.2f} | {predicted} |"
        )
    return "\n".join([*lines, "", *provenance("Measured on", records, "triton")]) + "\n"
