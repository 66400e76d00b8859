"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilewright.cost import BANDWIDTHS, size
from tilewright.hardware import DATASHEETS, GPU

if TYPE_CHECKING:
    from tilewright.report.timings import TimingRow
    from tilewright.spec import Case, Cost
    from tilewright.workbench.audit import Audit
    from tilewright.workbench.check import CaseVerdict, Verdict

BAD = "bold red"
MARK = {"wins": " ★", "ties": " ≈", "": ""}
LEAST_VERDICT = 12  # columns
STYLE = {"right": "green", "unsupported": "dim"} | dict.fromkeys(
    ("wrong", "tampered", "crashed", "timeout", "implausible"), BAD
)


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


def timings(found: Sequence[TimingRow], title: str, width: int = 160) -> Group:
    """One block of lines a case, fastest first and starred; below, why some have no time. Where it is narrow, what
    matters least is left out."""
    against = next((row.against for row in found if row.against), "eager")
    cells = [_cells(row, against) for row in found]
    names = ["kernel", "time", "95 %", "rate", "of ceiling", f"vs {against}", "extra memory", "host"]
    sizes = {name: max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(names)}
    for name in ("extra memory", "host", "rate", "95 %"):
        if sum(sizes.values()) + 2 * len(sizes) + LEAST_VERDICT > width:
            del sizes[name]
    parts: list[Any] = [Text(title)]
    for (case, dtype, direction), together in groupby(
        zip(found, cells, strict=True), key=lambda pair: (pair[0].case, pair[0].dtype, pair[0].direction)
    ):
        name = f"{case.replace(',', ', ')} {dtype}" + (f" {direction}" if direction != "forward" else "")
        table = Table(title=Text(name, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
        for column, least in sizes.items():
            table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True, min_width=least)
        table.add_column("verdict")
        for row, all_cells in together:
            shown = [Text(cell) for i, cell in enumerate(all_cells) if names[i] in sizes]
            shown[0].stylize("bold" if row.place else "")
            table.add_row(*shown, _verdict(row))
        parts += [table, ""]
    notes = dict.fromkeys(f"{row.kernel}: {row.verdict}, {row.reason}" for row in found if row.reason)
    if any(row.is_stale for row in found):
        notes["stale: the kernel's source has changed since it was measured"] = None
    return Group(*parts, *(Text(note, "dim") for note in notes))


def _cells(row: TimingRow, against: str) -> list[str]:
    low, high = row.interval_us or (0.0, 0.0)
    return [
        row.kernel + MARK[row.place],
        f"{row.us:.1f} us" + ("*" if row.calls > 1 else "") if row.us else "-",
        f"{low:.1f}–{high:.1f}" if row.interval_us else "",
        row.rate,
        f"{row.share:.0%}" if row.share else "",
        f"{row.ratio:.2f}x" + (f" {row.against}" if row.against != against else "") if row.ratio else "",
        size(row.extra_bytes) if row.extra_bytes is not None else "",
        f"{row.host_us:.0f} us" if row.host_us else "",
    ]


def _verdict(row: TimingRow) -> Text:
    said = row.verdict + ", by torch" * row.is_torchs
    if row.loses_to and row.loses_to.us and row.us:
        said = f"{said}, loses here: {row.loses_to.kernel} takes {row.loses_to.us / row.us:.2f} of its time"
    if row.is_stale:
        said += ", stale"
    return Text(said, "yellow" if row.loses_to or row.is_stale else STYLE[row.verdict])


def conditions(records: Sequence[dict[str, Any]], state: dict[str, Any]) -> Group:
    """Under which ceilings, by which timer and in what state of the GPU these were measured."""
    if not records:
        return Group()
    last = records[-1]
    sheet = DATASHEETS.get(last["device"]["gpu"])
    lines = [
        "Ceilings measured in the same run (and the share of the datasheet's): "
        + "; ".join(_ceilings(last["ceilings"], sheet))
        + "."
    ]
    timed = [r for r in records if r["median_us"] and r["timer"]]
    if timed:
        overheads = sorted(r["timer"]["overhead_us"] for r in timed)
        floor = timed[-1]["timer"]["floor_us"]
        lines.append(
            f"Timer: two events with nothing between them are {floor:.1f} us apart, which is not subtracted; "
            f"a sample costs {overheads[len(overheads) // 2]:.0f} us beside what it times."
        )
    if any(r["calls"] > 1 for r in timed):
        lines.append(
            "* back to back: so many calls in a sample that the events do not show, each on inputs of its own."
        )
    if late := {r["kernel"] for r in timed if r["timer"].get("unqueued")}:
        lines.append(f"Host time is in samples of {', '.join(sorted(late))}: a call waits for the GPU on its way.")
    if held := {reason for r in timed for reason in r["state"].get("throttled", ())}:
        which = f"{sum(bool(r['state'].get('throttled')) for r in timed)} of {len(timed)} timings"
        lines.append(f"Throttled by {', '.join(sorted(held))} in {which}, each of which was measured again.")
    if held := state.get("throttled"):
        lines.append(f"Throttled by {', '.join(held)} while the ceilings were measured: they may be too low.")
    return Group(*(Text(line, "dim") for line in lines))


def _ceilings(ceilings: dict[str, float], sheet: GPU | None) -> list[str]:
    rates = sheet.rates() if sheet else {}
    found = []
    for unit, rate in ceilings.items():
        figure = f"{rate / 1e9:.0f} GB/s" if unit in BANDWIDTHS else f"{rate / 1e12:.1f} T/s"
        found.append(f"{unit} {figure}" + (f" ({rate / rates[unit]:.0%})" if rates.get(unit) else ""))
    return found


def floors(found: Sequence[tuple[str, Case, str, Cost, str, float]], title: str) -> Table:
    """The least time of each case by a datasheet, and what binds."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("op", "case", "direction"):
        table.add_column(column)
    for column in ("reads", "writes", "floor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by")
    for name, case, direction, cost, unit, seconds in found:
        sizes = (size(cost.read), size(cost.written))
        table.add_row(name, f"{case} {case.dtype}", direction, *sizes, f"{seconds * 1e6:.1f} us", unit)
    return table


def audit(found: Audit, counted: dict[str, int] | None = None) -> Group:
    """One line an argument of each launch, then what to know of it; faults last, where they are seen."""
    from tilewright.interpreter.results import SECTOR  # here, since it takes a second

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
