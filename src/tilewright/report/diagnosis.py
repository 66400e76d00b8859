"""Render diagnoses in a terminal, and predictions beside measurements."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilewright import record
from tilewright.cost import size
from tilewright.report.formatting import digits, op_label
from tilewright.report.prediction_accuracy import means
from tilewright.workbench.explain import Diagnosis, term_name
from tilewright.workbench.explain.checklist import FAIL, NOT_APPLICABLE, PASS, UNKNOWN, Check
from tilewright.workbench.explain.validation import PredictionCheck

STYLES = {PASS: "green", FAIL: "bold red", NOT_APPLICABLE: "dim", UNKNOWN: "yellow"}
SMALL = 0.02  # share of the total below which a term is not shown


def overview(found: Diagnosis) -> Group:
    """Show the bottleneck, the distance from the ceiling and the eight checks. Each finding is printed once."""
    lines = [Text(f"{found.call.title}, {found.call.gpu.name}", "bold"), *map(Text, _sentences(found))]
    table = Table(box=None, pad_edge=False, show_header=False)
    for ratio in (None, None, 1):
        table.add_column(ratio=ratio, no_wrap=ratio is None)
    for check in found.checks:
        table.add_row(Text(check.verdict, STYLES[check.verdict]), check.name, _evidence(check))
    above = found.bottleneck.reason if found.bottleneck else None
    reasons = dict.fromkeys(check.advice for check in found.checks if check.verdict == UNKNOWN and check.advice)
    unknown = [reason for reason in reasons if not above or not reason.startswith(above)]
    return Group(*lines, table, *(Text(f"Unknown: {reason}.") for reason in unknown))


def _sentences(found: Diagnosis) -> Iterator[str]:
    call, made = found.call, found.prediction
    for one in call.launches:
        if one.launch and one.launch.note:
            yield f"{one.name}: {one.launch.note}."
    if found.bottleneck:
        yield f"Bottleneck: {found.bottleneck.name} ({found.bottleneck.reason}; {found.bottleneck.source})."
    else:
        yield "Bottleneck: unknown."
    if found.advice:
        yield f"→ {found.advice.rstrip('.')}."
    floor = "" if found.share or not found.floor_us else f"; floor {found.floor_us:.1f} us"  # else beside its check
    if call.timing:
        yield f"Time: {call.timing['median_us']:.1f} us, measured {call.timing['date'][:10]}{floor}."
    elif found.floor_us:
        yield f"Time: not measured ({call.no_timing_reason}){floor}."
    if made:
        parts = ", ".join(
            f"{term_name(name)} {term.us:.1f} us ({term.source})"
            for name, term in sorted(made.terms.items(), key=lambda pair: -pair[1].us)
            if term.us > SMALL * made.us
        )
        whose = " (these launches only)" if call.other_work else ""
        interval = f"{made.us:.1f} us ({made.low:.1f} to {made.high:.1f})"
        yield f"Predicted{whose}: {interval}: {parts}. Ceilings: {made.rates}."
        for what in made.excludes:
            if not found.bottleneck or what not in found.bottleneck.reason:
                yield f"Not included: {what}."
    if call.counters and (total := call.counters.dram_bytes):
        yield f"DRAM traffic: {size(total)} (counters)."
    if call.unchecked:
        yield f"Not checked: {call.unchecked}."


def _evidence(check: Check) -> Text:
    shown = Text()
    for number, fact in enumerate(check.facts):
        shown.append(("; " if number else "") + fact.text)
        shown.append(f" ({fact.source})", "dim")
    if check.source_line:
        file, line = check.source_line
        shown.append(f"\n{Path(file).name}:{line} ", "blue")
        shown.append(linecache.getline(file, line).strip(), "italic")
    if check.advice and check.verdict == FAIL:
        shown.append(f"\n→ {check.advice}")
    return shown


def predictions(found: Sequence[PredictionCheck]) -> Group:
    """Show a row per call, then the mean error by group."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("op", "kernel", "case"):
        table.add_column(name, no_wrap=True)
    for name in ("predicted us", "low us", "high us", "measured us", "ratio"):
        table.add_column(name, justify="right")
    for name in ("bottleneck", ""):
        table.add_column(name)
    for one in found:
        made, timing = one.prediction, one.timing
        case = record.spelled(timing["case"])
        numbers = [digits(us) for us in (made.us, made.low, made.high, timing["median_us"])]
        op = op_label(timing["op"], timing["direction"])
        stale = "timing of older code" if record.is_stale(dict(timing)) else ""
        table.add_row(op, timing["kernel"], case, *numbers, f"{one.ratio:.2f}", made.bottleneck, stale)
    return Group(table, "", *map(Text, means([one.as_record() for one in found])))
