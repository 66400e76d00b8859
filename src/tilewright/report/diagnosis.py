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
    """Show the bottleneck, the distance from the ceiling and the eight checks."""
    lines = [Text(f"{found.call.title}, {found.call.gpu.name}", "bold"), *map(Text, _sentences(found))]
    table = Table(box=None, pad_edge=False, show_header=False)
    for ratio in (None, None, 1):
        table.add_column(ratio=ratio, no_wrap=ratio is None)
    for check in found.checks:
        table.add_row(Text(check.verdict, STYLES[check.verdict]), check.name, _evidence(check))
    return Group(*lines, table)


def _sentences(found: Diagnosis) -> Iterator[str]:
    call, made = found.call, found.prediction
    for one in call.launches:
        if one.launch and one.launch.note:
            yield f"{one.name}: {one.launch.note}."
    if found.bottleneck:
        yield f"Bottleneck: {found.bottleneck.name} ({found.bottleneck.reason}; {found.bottleneck.source})."
    else:
        yield f"Bottleneck: unknown ({call.no_audit_reason})."
    if call.timing and found.floor_us:
        us, date = call.timing["median_us"], call.timing["date"][:10]
        yield f"Time: {us:.1f} us, measured {date}; floor {found.floor_us:.1f} us: {found.share:.0%} of the ceiling."
    elif found.floor_us:
        share = f", {found.share:.0%} of the predicted time" if found.share else ""
        yield f"Time: not measured ({call.no_timing_reason}); floor {found.floor_us:.1f} us{share}."
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
            yield f"Not included: {what}."
    if call.counters and (total := call.counters.dram_bytes):
        of = f", {total / call.cost.bytes:.2f} times the minimum" if call.cost else ""
        yield f"DRAM traffic: {size(total)}{of} (counters)."


def _evidence(check: Check) -> Text:
    shown = Text()
    for number, fact in enumerate(check.facts):
        shown.append(("; " if number else "") + fact.text)
        shown.append(f" ({fact.source})", "dim")
    if check.source_line:
        file, line = check.source_line
        shown.append(f"\n{Path(file).name}:{line} ", "blue")
        shown.append(linecache.getline(file, line).strip(), "italic")
    if check.advice:
        shown.append(f"\n→ {check.advice}" if check.verdict == FAIL else ("\n" if shown else "") + check.advice)
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
