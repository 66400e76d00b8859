"""Terminal tables of verdicts, timings and audits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilewright.cost import size
from tilewright.hardware import DATASHEETS, GPU
from tilewright.report.formatting import digits, percent, rate

if TYPE_CHECKING:
    from tilewright.report.timings import TimingRow
    from tilewright.workbench.audit import Audit
    from tilewright.workbench.check import CaseVerdict, Verdict

BAD = "bold red"
MARK = {"wins": " ★", "ties": " ≈", "": ""}
LEAST_VERDICT = 12  # characters
STYLE = {"right": "green", "unsupported": "dim"} | dict.fromkeys(
    ("wrong", "tampered", "crashed", "timeout", "implausible"), BAD
)


def verdicts(found: Sequence[Verdict], title: str) -> Group:
    """Render a row per kernel, then a map of the wrong elements of two-dimensional outputs."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("kernel", "verdict", "cases", "calls", "evidence"):
        table.add_column(column, justify="right" if column == "calls" else "left")
    for verdict in found:
        right = sum(case.verdict == "right" for case in verdict.cases)
        evidence = verdict.reason or "; ".join(verdict.labels) or _tightest(verdict)
        table.add_row(
            verdict.kernel,
            Text(verdict.summary, STYLE.get(verdict.verdict, BAD)),
            f"{right}/{len(verdict.cases)}" if verdict.cases else "",
            str(verdict.calls or ""),
            Text(evidence),
        )
    drawn = [(verdict.kernel, bad) for verdict in found if (bad := _first_bad(verdict)) and len(bad.picture) > 1]
    pictures = [Text(f"\n{name}, {c.case} {c.dtype}, wrong elements:\n" + "\n".join(c.picture)) for name, c in drawn]
    return Group(table, *pictures)


def _first_bad(verdict: Verdict) -> CaseVerdict | None:
    return next(
        (case for case in verdict.cases if not verdict.right and case.verdict in (verdict.verdict, "wrong")), None
    )


def timings(found: Sequence[TimingRow], title: str, width: int = 160) -> Group:
    """Render a table per case, the fastest kernel first, and below them why some kernels have no time.

    A narrow terminal drops the least important columns.
    """
    against = next((row.speedup_over for row in found if row.speedup_over), "eager")
    names = ["kernel", "us", "95 % interval", "rate", "% of ceiling", f"vs {against}", "extra MB", "host us"]
    cells = [_cells(row, against) for row in found]
    sizes = {name: max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(names)}
    for name in ("extra MB", "host us", "rate", "95 % interval"):
        if sum(sizes.values()) + 2 * len(sizes) + LEAST_VERDICT > width:
            del sizes[name]
    parts: list[Any] = [Text(title)]
    for (case, dtype, direction), together in groupby(
        zip(found, cells, strict=True), key=lambda pair: (pair[0].case, pair[0].dtype, pair[0].direction)
    ):
        group = list(together)
        name = f"{case.replace(',', ', ')} {dtype}" + (f" {direction}" if direction != "forward" else "")
        table = Table(title=Text(name, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
        for column, least in sizes.items():
            header = group[0][0].rate_unit if column == "rate" else column
            table.add_column(header, justify="left" if column == "kernel" else "right", no_wrap=True, min_width=least)
        table.add_column("verdict")
        for row, all_cells in group:
            shown = [Text(cell) for i, cell in enumerate(all_cells) if names[i] in sizes]
            shown[0].stylize("bold" if row.place else "")
            table.add_row(*shown, _verdict(row))
        parts += [table, ""]
    notes = dict.fromkeys(f"{row.kernel}: {row.verdict}, {row.reason}" for row in found if row.reason)
    if any(row.is_stale for row in found):
        notes["stale: the source of the kernel changed after the measurement"] = None
    return Group(*parts, *(Text(note, "dim") for note in notes))


def _cells(row: TimingRow, against: str) -> list[str]:
    speedup = f"{row.speedup:.2f}x" if row.speedup else ""
    return [
        row.kernel + MARK[row.place],
        digits(row.us) + "*" * (row.calls > 1) if row.us else "-",
        f"{digits(row.interval_us[0])} – {digits(row.interval_us[1])}" if row.interval_us else "",
        digits(row.achieved),
        percent(row.share),
        f"{speedup} {row.speedup_over}" if speedup and row.speedup_over != against else speedup,
        digits(row.extra_bytes / 1e6) if row.extra_bytes is not None else "",
        digits(row.host_us),
    ]


def _verdict(row: TimingRow) -> Text:
    text = row.verdict + ", runs torch" * row.runs_torch
    if row.loses_to and row.loses_to.us and row.us:
        text += f", loses to {row.loses_to.kernel} ({row.loses_to.us / row.us:.2f}x)"
    if row.is_stale:
        text += ", stale"
    return Text(text, "yellow" if row.loses_to or row.is_stale else STYLE[row.verdict])


def conditions(records: Sequence[dict[str, Any]], state: dict[str, Any]) -> Group:
    """Describe the ceilings, the timer and the state of the GPU during the measurement."""
    if not records:
        return Group()
    last = records[-1]
    sheet = DATASHEETS.get(last["device"]["gpu"])
    lines = ["Measured ceilings (share of the datasheet peak): " + "; ".join(_ceilings(last["ceilings"], sheet)) + "."]
    timed = [r for r in records if r["median_us"] and r["timer"]]
    if timed:
        overheads = sorted(r["timer"]["overhead_us"] for r in timed)
        floor = timed[-1]["timer"]["floor_us"]
        lines.append(
            f"Timer: two events with nothing between them are {floor:.1f} us apart, which is not subtracted; "
            f"each sample adds {overheads[len(overheads) // 2]:.0f} us of overhead outside the timed region."
        )
    if any(r["calls"] > 1 for r in timed):
        lines.append(
            "* several calls back to back per sample, to hide the cost of the events; each call has its own inputs."
        )
    if late := {r["kernel"] for r in timed if r["timer"].get("unqueued")}:
        lines.append(f"Samples of {', '.join(sorted(late))} include host time: a call synchronises with the GPU.")
    if reasons := {reason for r in timed for reason in r["state"].get("throttled", ())}:
        count = f"{sum(bool(r['state'].get('throttled')) for r in timed)} of {len(timed)} timings"
        lines.append(f"Throttled ({', '.join(sorted(reasons))}) in {count}, after a second attempt.")
    if reasons := state.get("throttled"):
        lines.append(f"Throttled ({', '.join(reasons)}) while the ceilings were measured: they may be too low.")
    return Group(*(Text(line, "dim") for line in lines))


def _ceilings(ceilings: dict[str, float], sheet: GPU | None) -> list[str]:
    peaks = sheet.rates() if sheet else {}
    return [
        f"{unit} {rate(unit, value)}" + (f" ({value / peaks[unit]:.0%})" if peaks.get(unit) else "")
        for unit, value in ceilings.items()
    ]


def audit(found: Audit, counted: dict[str, int] | None = None) -> Group:
    """Render a row per launch and argument, then the summary; faults last, where they are seen."""
    from tilewright.workbench.audit import COLUMNS, OVERFETCH  # imported here because it takes a second

    table = Table(title=found.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place < 2 else "right", no_wrap=True)
    for row in found.rows():
        table.add_row(*row)
    lines = [Text(line) for line in found.summary()]
    if counted:
        read, written = (sum(getattr(t, name) for t in found.traffic) for name in ("distinct_read", "distinct_written"))
        r, w = counted["read"], counted["written"]
        ratios = (f"{r / max(read, 1):.3f}", f"{w / max(written, 1):.3f}")
        text = f"{size(r)} read ({ratios[0]}x the distinct bytes), {size(w)} written ({ratios[1]}x)"
        lines.append(Text(f"Hardware counters: {text}."))
    faults = [Text(str(f), "bold red") for f in found.findings]
    return Group(table, Text(OVERFETCH, "dim"), *lines, *faults, "")


def _tightest(verdict: Verdict) -> str:
    used = max((case.max_error / case.budget for case in verdict.cases if case.budget), default=0.0)
    return f"largest error {used:.0%} of the error budget"
