"""The first page: every op at a glance, where ours loses, and what it was all measured on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from tilewright import hardware, source
from tilewright.report.timings import TimingRow
from tilewright.report.site import components
from tilewright.report.site.components import Outcome, Page, counted

WORST = 3  # losses named here; the op's page has all
COLUMNS = (
    "Operation",
    "Direction",
    "Data type",
    "Cases",
    "Best of ours",
    "Share of the ceiling",
    "Against the best baseline",
)
NOTE = """<p class="note">A tick is a case: the share of the ceiling that our best kernel reaches,
<span class="wins">green</span> where it wins, grey where it ties, <span class="bad">red</span> where it loses.
Speeds are the best baseline's time over ours.</p>"""


def page(timings: list[dict[str, Any]], found: dict[str, list[TimingRow]], pages: dict[str, str]) -> Page:
    """`found` has the rows of each op, `pages` the names of their files."""
    names = components.device_names(timings)
    stale = sum(row.is_stale for of_op in found.values() for row in of_op)
    facts = [
        counted(len(found), "operation"),
        counted(len(timings), "record"),
        ", ".join(map(escape, names.values())),
        components.span_of_days([r["date"][:10] for r in timings]) if timings else "nothing was recorded yet",
        f'<b class="stale">{stale:,} stale: the source has changed since</b>' if stale else "",
    ]
    body = [
        "<header><h1>Tilewright: what was measured</h1>",
        f"<p>How fast each kernel is, against the fastest that this hardware allows.</p>{components.facts(facts)}</header>",
        *(_of_gpu(gpu, name, found, pages) for gpu, name in names.items()),
        f"<section><h2>Environment</h2>{components.environments(timings)}</section>" if timings else "",
        *(_ceilings(gpu, names[gpu], measured) for gpu, measured in components.ceilings(timings).items()),
    ]
    return Page("Report", "Tilewright report", "\n".join(body))


def _of_gpu(gpu: str, name: str, found: dict[str, list[TimingRow]], pages: dict[str, str]) -> str:
    lines, losses = [], []
    for op, of_op in found.items():
        for (_, where, direction, dtype), group in components.grouped(of_op).items():
            if where == gpu:
                of = components.outcomes(group)
                lines.append(_line(op, pages[op], direction, dtype, group, of))
                lost = components.losses(of)
                losses += lost[:WORST]
                if len(lost) > WORST:
                    losses.append(
                        f'<li><p><a href="{pages[op]}.html">{len(lost) - WORST:,} more of {escape(op)}</a></p>'
                    )
    head = "".join(f"<th>{column}" for column in COLUMNS)
    listed = f'<h3>Where ours loses</h3><ul class="findings">{"".join(losses)}</ul>' if losses else ""
    return (
        f'<section><h2>{escape(name)}</h2><div class="wide cards"><table class="summary"><thead><tr>{head}</thead>'
        f"<tbody>{''.join(lines)}</table></div>{NOTE}{listed}</section>"
    )


def _line(op: str, file: str, direction: str, dtype: str, group: Sequence[TimingRow], of: Sequence[Outcome]) -> str:
    best = Counter(one.own.kernel for one in of).most_common(3)
    shares = [100 * one.own.share for one in of if one.own.share]
    ratios = [one.ratio for one in of if one.ratio]
    stale = " <mark>stale</mark>" if any(one.own.is_stale for one in of) else ""
    named = ", ".join(f"<code>{escape(kernel)}</code> <small>{count:,}</small>" for kernel, count in best)
    path = source.op_files().get(op)
    title = f' title="{escape(source.read(path).summary)}"' if path else ""
    cells = (
        f'<a href="{file}.html"{title}><b>{escape(op)}</b></a>',
        escape(direction),
        escape(dtype),
        f"{len(components.by_case(group)):,}",
        f"<span>{named}{stale}</span>",
        f"<span>{_strip(of)} {components.span(shares, '.0f')} %</span>" if shares else "",
        f"<span>{components.span(ratios, '.2f') + 'x: ' if ratios else ''}{_results(of)}</span>",
    )
    return "<tr>" + "".join(f'<td data-label="{label}">{cell}' for label, cell in zip(COLUMNS, cells, strict=True))


def _results(of: Sequence[Outcome]) -> str:
    said = components.counts(of) or "none of ours was timed"
    if any(one.own.loses_to for one in of):
        return f'<b class="bad">{said}</b>'
    return f'<span class="wins">{said}</span>' if any(one.rival for one in of) else f"<small>{said}</small>"


def _strip(of: Sequence[Outcome]) -> str:
    """A picture of the shares, from nothing to all."""
    ticks = dict.fromkeys((round(100 * min(one.own.share, 1.0)), one.result) for one in of if one.own.share)
    drawn = "".join(f'<i class="{result.partition(" ")[0]}" style="left:{at}%"></i>' for at, result in ticks)
    return f'<span class="strip">{drawn}</span>'


def _ceilings(gpu: str, name: str, measured: dict[str, list[float]]) -> str:
    sheet = hardware.DATASHEETS.get(gpu)
    said = sheet.rates() if sheet else {}
    lines = []
    for unit, values in measured.items():
        typical, promised = components.typical(values), said.get(unit)
        ends = [components.rate(unit, end) for end in (min(values), max(values))]
        lines.append(
            f'<tr><th scope="row">{escape(unit)}<td class="number">{components.rate(unit, typical)}'
            f'<td class="number">{" to ".join(dict.fromkeys(ends)) if len(values) > 1 else ""}'
            f'<td class="number">{components.rate(unit, promised) if promised else ""}'
            f'<td class="number">{components.share(typical / promised) if promised else ""}'
        )
    columns = ("Measured", "Over the runs", "Datasheet", "Reached")
    head = "<th>Unit" + "".join(f'<th class="number">{column}' for column in columns)
    source_of = f'<p class="note">Datasheet: {escape(sheet.source)}.</p>' if sheet else ""
    return (
        f'<section><h2>Ceilings of {escape(name)}</h2><div class="wide"><table class="narrow"><thead><tr>{head}</thead>'
        f"<tbody>{''.join(lines)}</table></div>{source_of}</section>"
    )
