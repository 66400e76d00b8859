"""Render inspections in a terminal: tables, compiled code beside its source, differences."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilewright.cost import amount, size
from tilewright.workbench.inspect import CompileFailure, Inspection, Roofline
from tilewright.workbench.inspect.instructions import MOVES
from tilewright.workbench.inspect.line_info import SourceLine, code_lines

if TYPE_CHECKING:
    from tilewright.workbench.inspect.diff import KernelDiff

BAD = "bold red"
CODE_WIDTH = 88
SOURCE_WIDTH = 60
TOKENS = {
    r"(//|;|#).*$": "dim",
    r"/\*.*?\*/": "dim",
    r"@!?U?P\w+": "magenta",
    r"\b[A-Z][A-Z0-9]+(\.[\w.]+)?\b(?=\s)": "bold cyan",
    r"^\s+[a-z]+[._][\w.:]+": "cyan",
    r"[%$][\w.]+|\bU?R\d+\b|\b[vs]\d+\b|\b[vs]\[\d+:\d+\]": "green",
    r"\b(\d+|0x[0-9a-f]+)\b": "yellow",
}


def is_bad(found: Inspection | CompileFailure) -> bool:
    return isinstance(found, CompileFailure) or found.launch_error is not None


def overview(found: Sequence[Inspection | CompileFailure]) -> Group:
    """Show a row per launch and GPU, then the instruction mix, then notes."""
    parts: list[Any] = []
    for title, together in groupby(found, key=lambda one: one.title):
        group = list(together)
        good = [one for one in group if isinstance(one, Inspection)]
        parts.append(_figures(good, title) if good else Text(title, "bold"))
        for name in dict.fromkeys(one.name for one in good):
            parts += ["", _instructions([one for one in good if one.name == name])]
        parts += [part for one in good if one.shared_accesses for part in ("", _shared_accesses(one))]
        notes = [line for one in good for line in _sentences(one)] + [_describe_work(one) for one in good]
        parts += ["", *map(Text, dict.fromkeys(notes))]  # shared by several launches: once
        parts += [Text(f"{one.gpu.name}: {one.error}", BAD) for one in group if isinstance(one, CompileFailure)]
    return Group(*parts)


def _figures(found: Sequence[Inspection], title: str) -> Table:
    table = Table(title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
    table.add_column("launch", no_wrap=True)
    table.add_column("gpu", no_wrap=True)
    has_stack = any(one.resources.stack for one in found)
    stack = ("stack",) if has_stack else ()
    names = ("grid", "threads", "registers", "spilled", *stack, "shared", "blocks/SM", "occupancy", "waves")
    for name in (*names, "tail idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limited by")
    for one in found:
        used, occupancy = one.resources, one.occupancy
        grid = re.sub(r"(x1)+$", "", "x".join(map(str, one.launch.grid))) if one.launch else ""
        table.add_row(
            one.name + (f" ({one.launch.direction})" if one.launch and one.launch.direction != "forward" else ""),
            one.gpu.name,
            grid + (f" of {one.compiled.cluster}" if one.compiled.cluster > 1 else ""),
            str(one.compiled.threads),
            str(used.registers),
            Text(size(used.spills), BAD) if used.spills else "0",
            *((size(used.stack),) if has_stack else ()),
            size(used.shared),
            str(occupancy.blocks),
            f"{occupancy.share:.0%}",
            f"{one.waves:.1f}" if one.waves else "",
            f"{one.idle:.0%}" if one.idle is not None else "",
            occupancy.limiter,
        )
    return table


def _instructions(found: Sequence[Inspection]) -> Table:
    """Show the instruction counts by kind, a column per GPU."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"{found[0].name}: instructions", no_wrap=True)
    for one in found:
        table.add_column(one.gpu.name)
    mixes = [one.mix.as_json() for one in found]
    for kind in dict.fromkeys(kind for mix in mixes for kind in mix):
        table.add_row(kind, *(_cell(kind, mix.get(kind, {})) for mix in mixes))
    return table


def _cell(kind: str, details: dict[str, int]) -> str:
    if kind in MOVES or kind in ("tensor core", "special function", "atomic", "bulk copy"):
        return ", ".join(f"{count} x {what}" for what, count in details.items())
    return str(sum(details.values()) or "")


def _shared_accesses(one: Inspection) -> Table:
    """Show the wavefronts of each source line that accesses shared memory."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"{one.name} on {one.gpu.name}: shared memory", no_wrap=True)
    for name in ("wavefronts/warp", "ideal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source")
    for access in one.shared_accesses or ():
        what = f"{access.kind}, {access.count} x {access.width} B"
        numbers = [f"{count:.1f}" if count else "unknown" for count in (access.wavefronts, access.ideal)]
        style = BAD if access.wavefronts and access.wavefronts > (access.ideal or 0) else ""
        table.add_row(what, Text(numbers[0], style), numbers[1], Text(_source(access.source_line)))
    return table


def _source(place: SourceLine) -> str:
    if place is None:
        return ""
    file, number = place
    return f"{Path(file).name}:{number} {linecache.getline(file, number).strip()[:SOURCE_WIDTH]}"


def _sentences(one: Inspection) -> Iterator[str]:
    who = f"{one.name} on {one.gpu.name}"
    if one.launch_error:
        yield f"{who} cannot be launched: {one.launch_error}."
    if one.launch and one.launch.programs < 1:
        yield f"{who}: the grid is empty; nothing is launched."
    if one.launch and one.launch.note:
        yield f"{who}: {one.launch.note}."
    widths = [
        f"{count:.1f} B {what}s"
        for what, count in (
            ("load", one.mix.mean_width("global load", "async copy")),
            ("store", one.mix.mean_width("global store")),
        )
        if count
    ]
    if widths:
        yield f"{who}: {' and '.join(widths)} per thread; 16 B is the maximum."
    if one.shared_accesses is None and one.resources.shared:
        yield f"{who}: bank conflicts are unknown, because there is no PTX to simulate."


def _describe_work(one: Inspection) -> str:
    """Describe the minimum work, per program if possible, and its place on the roofline."""
    if (work := one.roofline) is None:
        count = "" if one.launch is None else "; `tilewright explain` counts the bytes of Triton kernels"
        return f"The minimum bytes and FLOPs are unknown, because a file does not define its cost{count}."
    if work.bytes_per_program is not None and work.flops_per_program is not None:
        who, least = (
            f"{one.name} on {one.gpu.name}",
            f"{_least(work.bytes_per_program, work.flops_per_program)} per program",
        )
    else:
        is_forward = one.launch is None or one.launch.direction == "forward"
        who = f"The {'' if is_forward else 'backward '}call on {one.gpu.name}"
        least = f"{_least(work.cost.bytes, work.flops)} for all launches together"
    return f"{who}: at least {least}; {_bound(work)}."


def _least(count: float, flops: float) -> str:
    return f"{size(count)} and {amount(flops) if flops else 'no '}FLOP"


def _bound(work: Roofline) -> str:
    if work.unit is None:
        rates = f"{work.gpu.name} has no known rate for {' and '.join(work.cost.flops)}"
        return rates if work.cost.flops else "memory-bound"
    return f"{work.intensity_summary}: {'memory' if work.intensity < work.ridge else 'compute'}-bound"


def code(found: Inspection | CompileFailure, forms: Sequence[str]) -> Group:
    """Show the code with its source lines beside it."""
    if isinstance(found, CompileFailure):
        return Group(Text(f"{found.gpu.name}: {found.error}", BAD))
    parts: list[Text] = []
    for form in forms:
        parts.append(Text(f"{found.name}, {found.gpu.name}, {form}", "bold"))
        before = None
        for line in code_lines(found.compiled, form):
            shown = _coloured(line.code)
            if line.source_line and line.source_line != before:
                shown.pad_right(max(0, CODE_WIDTH - len(shown)))
                file, number = line.source_line
                shown.append(f" │ {Path(file).name}:{number} ", "blue")
                shown.append(linecache.getline(file, number).strip(), "italic")
            before = line.source_line or before
            parts.append(shown)
    return Group(*parts)


def _coloured(text: str) -> Text:
    shown = Text(text, no_wrap=True)
    for pattern, style in reversed(TOKENS.items()):
        shown.highlight_regex(pattern, style)
    return shown


def difference(found: KernelDiff, title: str, names: tuple[str, str], forms: Sequence[str]) -> Group:
    """Show the figures that differ and, for each form, the code as a diff."""
    table = Table(title=Text(f"{title}: differences", "bold"), title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("change", justify="right")
    for name, (a, b) in found.numbers.items():
        if a != b:
            change = f"{b - a:+d}" if isinstance(a, int) and isinstance(b, int) else ""
            table.add_row(name, *("" if side is None else str(side) for side in (a, b)), change)
    colours = {"+": "green", "-": "red", "@": "dim"}
    lines = [Text(line, colours.get(line[:1], "")) for form in forms for line in found.code(form, names)]
    return Group(table if table.row_count else Text(f"{title}: no differences."), *lines)
