"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tilewright.report.rows import Row
    from tilewright.tools.audit import Audit
    from tilewright.tools.check import CaseVerdict, Verdict

BAD = "bold red"
STYLE = {"right": "green", "wrong": BAD, "tampered": BAD, "crashed": BAD, "timeout": BAD, "unsupported": "dim"}


def verdicts(found: Sequence[Verdict], title: str) -> Group:
    """One line a kernel, then pictures of where those of two dimensions are wrong."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("kernel", "verdict", "cases", "evidence"):
        table.add_column(column)
    for verdict in found:
        right = sum(case.verdict == "right" for case in verdict.cases)
        evidence = verdict.reason or "; ".join(verdict.labels) or _tightest(verdict)
        table.add_row(
            verdict.kernel,
            Text(verdict.verdict, STYLE[verdict.verdict]),
            f"{right}/{len(verdict.cases)}" if verdict.cases else "",
            Text(evidence),
        )
    drawn = [(verdict.kernel, bad) for verdict in found if (bad := _first_bad(verdict)) and len(bad.picture) > 1]
    pictures = [Text(f"\n{name}, {c.case} {c.dtype}, where it is off:\n" + "\n".join(c.picture)) for name, c in drawn]
    return Group(table, *pictures)


def _first_bad(verdict: Verdict) -> CaseVerdict | None:
    return next((case for case in verdict.cases if case.verdict == verdict.verdict != "right"), None)


def timings(found: Sequence[Row], title: str) -> Group:
    """One block of lines a case, fastest first and starred; below, why some have no time."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("case", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("time", "rate", "of ceiling", "vs eager"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for (case, dtype, direction), together in groupby(found, key=lambda r: (r.case, r.dtype, r.direction)):
        name = f"{case} {dtype}" + (" backward" if direction == "backward" else "")
        for row in together:
            table.add_row(
                name,
                Text(f"{row.kernel} ★" if row.is_fastest else row.kernel, "bold" if row.is_fastest else ""),
                f"{row.us:.1f} us" if row.us else "-",
                row.rate,
                f"{row.share:.0%}" if row.share else "",
                f"{row.against_eager:.2f}x" if row.against_eager else "",
                Text(
                    f"{row.verdict}, stale" if row.is_stale else row.verdict,
                    "yellow" if row.is_stale else STYLE[row.verdict],
                ),
            )
            name = ""
        table.add_section()
    notes = dict.fromkeys(f"{row.kernel}: {row.verdict}, {row.reason}" for row in found if row.reason)
    if any(row.is_stale for row in found):
        notes["stale: the kernel's source has changed since it was measured"] = None
    return Group(table, *(Text(note, "dim") for note in notes))


def audit(found: Audit, counted: dict[str, int] | None = None) -> Group:
    """One line an argument of each launch, then what to know of it; faults last, where they are seen."""
    from tilewright.interpreter.observed import SECTOR, size  # here, since it takes a second

    table = Table(title=found.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("launch", no_wrap=True)
    table.add_column("argument", no_wrap=True)
    for column in ("loaded", "stored", "distinct", "reads each", "masked off", "in sectors*"):
        table.add_column(column, justify="right", no_wrap=True)
    for launch in found.launches:
        name = f"{launch.kernel} {'x'.join(map(str, launch.grid))}"
        for t in (t for t in launch.arguments.values() if t.lanes):
            distinct = size(t.distinct_read) if t.distinct_read else ""
            written = size(t.distinct_written) if t.distinct_written else ""
            table.add_row(
                name,
                f"{t.name} ({found.role(t)})",
                size(t.loaded + t.atomic) if t.loaded + t.atomic else "",
                size(t.stored + t.atomic) if t.stored + t.atomic else "",
                " + ".join(filter(None, (distinct, written))),
                f"{t.reads_per_element:.2f}" if t.distinct_read else "",
                f"{t.masked / t.lanes:.0%}",
                f"{t.sectors * SECTOR / t.moved:.2f}x" if t.moved else "",
            )
            name = ""
        table.add_section()
    lines = [Text(line) for line in found.summary()]
    if counted:
        read, written = (sum(getattr(t, name) for t in found.traffic) for name in ("distinct_read", "distinct_written"))
        r, w = counted["read"], counted["written"]
        said = f"{size(r)} read, {r / max(read, 1):.3f}x the distinct; {size(w)} written, {w / max(written, 1):.3f}x"
        lines.append(Text(f"Counted by the hardware: {said}."))
    faults = [Text(str(f), "bold red") for f in found.findings]
    note = Text(
        "* bytes of 32-byte sectors against bytes used: an estimate, for lanes along the smallest stride", "dim"
    )
    return Group(table, note, *lines, *faults, "")


def pairs(content: dict[str, Any], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    for name, value in content.items():
        table.add_row(name, str(value))
    return table


def _tightest(verdict: Verdict) -> str:
    used = max((case.max_error / case.budget for case in verdict.cases if case.budget), default=0.0)
    return f"largest error {used:.0%} of its budget"
