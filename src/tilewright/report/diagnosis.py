"""Diagnoses for a terminal, and predictions beside measurements."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilewright import record
from tilewright.cost import size
from tilewright.report.prediction_accuracy import means
from tilewright.workbench.explain import Diagnosis
from tilewright.workbench.explain.checklist import FAIL, NOT_APPLICABLE, PASS, UNKNOWN, Point
from tilewright.workbench.explain.validation import Compared

STYLES = {PASS: "green", FAIL: "bold red", NOT_APPLICABLE: "dim", UNKNOWN: "yellow"}
SMALL = 0.02  # of the whole: parts of a prediction that are not worth a word


def overview(found: Diagnosis) -> Group:
    """What binds, how far from the ceiling, and the eight points."""
    lines = [Text(f"{found.evidence.title}, {found.evidence.gpu.name}", "bold"), *map(Text, _sentences(found))]
    table = Table(box=None, pad_edge=False, show_header=False)
    for ratio in (None, None, 1):
        table.add_column(ratio=ratio, no_wrap=ratio is None)
    for point in found.points:
        table.add_row(Text(point.verdict, STYLES[point.verdict]), point.name, _evidence(point))
    return Group(*lines, table)


def _sentences(found: Diagnosis) -> Iterator[str]:
    known, made = found.evidence, found.prediction
    for one in known.launches:
        if one.launch and one.launch.note:
            yield f"{one.name}: {one.launch.note}."
    if found.binding:
        yield f"Binds: {found.binding.what} ({found.binding.why}; {found.binding.source})."
    else:
        yield f"Binds: not known, as its bytes are not: {known.unaudited}."
    if known.timing and found.floor_us:
        us, date = known.timing["median_us"], known.timing["date"][:10]
        yield f"Time: {us:.1f} us, measured {date}; at least {found.floor_us:.1f} us: {found.share:.0%} of the ceiling."
    elif found.floor_us:
        share = f", {found.share:.0%} of what is predicted" if found.share else ""
        yield f"Time: not measured ({known.untimed}); at least {found.floor_us:.1f} us{share}."
    if made:
        parts = ", ".join(
            f"{name} {term.us:.1f} ({term.source})"
            for name, term in sorted(made.terms.items(), key=lambda pair: -pair[1].us)
            if term.us > SMALL * made.us
        )
        whose = ", of its launches alone" if known.rest else ""
        interval = f"{made.us:.1f} us, from {made.low:.1f} to {made.high:.1f}"
        yield f"Predicted{whose}: {interval}: {parts}. Ceilings: {made.rates}."
        for what in made.lacks:
            yield f"Not in it: {what}."
    if known.counted and (total := known.counted.dram_bytes):
        of = f", {total / known.cost.bytes:.2f} times the least" if known.cost else ""
        yield f"Memory: {size(total)}{of} (counters)."


def _evidence(point: Point) -> Text:
    shown = Text()
    for number, fact in enumerate(point.facts):
        shown.append(("; " if number else "") + fact.text)
        shown.append(f" ({fact.source})", "dim")
    if point.place:
        file, line = point.place
        shown.append(f"\n{Path(file).name}:{line} ", "blue")
        shown.append(linecache.getline(file, line).strip(), "italic")
    if point.move:
        shown.append(f"\n→ {point.move}" if point.verdict == FAIL else ("\n" if shown else "") + point.move)
    return shown


def predictions(found: Sequence[Compared]) -> Group:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("op", "kernel", "case"):
        table.add_column(name, no_wrap=True)
    for name in ("predicted us", "from", "to", "measured us", "ratio"):
        table.add_column(name, justify="right")
    for name in ("binds", ""):
        table.add_column(name)
    for one in found:
        made, timing = one.prediction, one.timing
        case = record.spelled(timing["case"])
        numbers = [f"{us:.1f}" for us in (made.us, made.low, made.high, timing["median_us"])]
        way = "" if timing["direction"] == "forward" else f" {timing['direction']}"
        stale = "the timing is of older code" if record.is_stale(dict(timing)) else ""
        table.add_row(timing["op"] + way, timing["kernel"], case, *numbers, f"{one.ratio:.2f}", made.binds, stale)
    return Group(table, "", *map(Text, means([one.as_record() for one in found])))
