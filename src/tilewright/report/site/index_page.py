"""The first page: a row per operation, the cases that a baseline wins, the environment and the ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from tilewright import hardware, source
from tilewright.report.formatting import date_range, percent, rate
from tilewright.report.site import components
from tilewright.report.site.components import Outcome, Page, count_of
from tilewright.report.timings import TimingRow

WORST = 3  # losses listed per operation; the operation's page lists all
COLUMNS = (
    "Operation",
    "Direction",
    "Data type",
    "Cases",
    "Fastest of our kernels",
    "% of ceiling",
    "Speedup over the best baseline",
)
NOTE = """<p class="note">A tick is a case: the share of the ceiling that our fastest kernel reaches,
<span class="wins">green</span> for a win, grey for a tie, <span class="loses">red</span> for a loss. The speedup is the
best baseline's time over ours. The number after a kernel counts the cases in which it is our fastest.</p>"""


def page(timings: list[dict[str, Any]], found: dict[str, list[TimingRow]], files: dict[str, str]) -> Page:
    """Return the page; `found` has the rows of each op, `files` the names of their pages."""
    names = components.device_names(timings)
    stale = sum(row.is_stale for rows in found.values() for row in rows)
    facts = [
        count_of(len(found), "operation"),
        count_of(len(timings), "record"),
        ", ".join(map(escape, names.values())),
        escape(date_range([r["date"][:10] for r in timings])) if timings else "no records yet",
        f'<b class="stale">{stale:,} stale: the source changed after the measurement</b>' if stale else "",
    ]
    body = [
        "<header><h1>Tilewright: results</h1>",
        "<p>The time of every kernel beside its baselines and the limit of the hardware.</p>",
        f"{components.facts(facts)}</header>",
        *(_of_gpu(gpu, name, found, files) for gpu, name in names.items()),
        f"<section><h2>Environment</h2>{components.environments(timings)}</section>" if timings else "",
        *(_ceilings(gpu, names[gpu], measured) for gpu, measured in components.ceilings(timings).items()),
    ]
    return Page("Results", "Tilewright results", "\n".join(body))


def _of_gpu(gpu: str, name: str, found: dict[str, list[TimingRow]], files: dict[str, str]) -> str:
    lines, losses = [], []
    for op, rows in found.items():
        for (_, where, direction, dtype), group in components.grouped(rows).items():
            if where == gpu:
                outcomes = components.outcomes(group)
                lines.append(_line(op, files[op], direction, dtype, group, outcomes))
                lost = components.losses(outcomes)
                losses += lost[:WORST]
                if len(lost) > WORST:
                    more = f"{len(lost) - WORST:,} more of {escape(op)} {direction}"
                    losses.append(f'<li><p><a href="{files[op]}.html">{more}</a></p>')
    head = "".join(f"<th>{column}" for column in COLUMNS)
    listed = f'<h3>Cases that a baseline wins</h3><ul class="findings">{"".join(losses)}</ul>' if losses else ""
    return (
        f'<section><h2>{escape(name)}</h2><div class="wide cards"><table class="summary"><thead><tr>{head}</thead>'
        f"<tbody>{''.join(lines)}</table></div>{NOTE}{listed}</section>"
    )


def _line(
    op: str, file: str, direction: str, dtype: str, group: Sequence[TimingRow], outcomes: Sequence[Outcome]
) -> str:
    best = Counter(one.ours.kernel for one in outcomes).most_common(3)
    shares = [100 * one.ours.share for one in outcomes if one.ours.share]
    speedups = [one.speedup for one in outcomes if one.speedup]
    stale = " <mark>stale</mark>" if any(one.ours.is_stale for one in outcomes) else ""
    kernels = ", ".join(f"<code>{escape(kernel)}</code> <small>{count:,}</small>" for kernel, count in best)
    path = source.op_files().get(op)
    title = f' title="{escape(source.read(path).summary)}"' if path else ""
    counts = components.counts(outcomes) or "<small>none of our kernels was timed</small>"
    cells = (
        f'<a href="{file}.html"{title}><b>{escape(op)}</b></a>',
        escape(direction),
        escape(dtype),
        f"{len(components.by_case(group)):,}",
        f"<span>{kernels}{stale}</span>",
        f"<span>{_strip(outcomes)} {components.span(shares, '.0f')}</span>" if shares else "",
        f"<span>{components.span(speedups, '.2f') + ': ' if speedups else ''}{counts}</span>",
    )
    return "<tr>" + "".join(f'<td data-label="{label}">{cell}' for label, cell in zip(COLUMNS, cells, strict=True))


def _strip(outcomes: Sequence[Outcome]) -> str:
    """Draw the shares of the ceiling as ticks between 0 and 100 %."""
    ticks = dict.fromkeys((round(100 * min(one.ours.share, 1.0)), one.result) for one in outcomes if one.ours.share)
    drawn = "".join(f'<i class="{result.partition(" ")[0]}" style="left:{at}%"></i>' for at, result in ticks)
    return f'<span class="strip">{drawn}</span>'


def _ceilings(gpu: str, name: str, measured: dict[str, list[float]]) -> str:
    sheet = hardware.DATASHEETS.get(gpu)
    peaks = sheet.rates() if sheet else {}
    lines = []
    for unit, values in measured.items():
        typical, peak = components.typical(values), peaks.get(unit)
        ends = [rate(unit, end) for end in (min(values), max(values))]
        lines.append(
            f'<tr><th scope="row">{escape(unit)}<td class="number">{rate(unit, typical)}'
            f'<td class="number">{" to ".join(dict.fromkeys(ends)) if len(values) > 1 else ""}'
            f'<td class="number">{rate(unit, peak) if peak else ""}'
            f'<td class="number">{percent(typical / peak) if peak else ""}'
        )
    columns = ("Measured (median)", "Range over the runs", "Peak (datasheet)", "% of peak")
    head = "<th>Unit" + "".join(f'<th class="number">{column}' for column in columns)
    datasheet = f'<p class="note">Datasheet: {escape(sheet.source)}.</p>' if sheet else ""
    return (
        f'<section><h2>Ceilings of {escape(name)}</h2><div class="wide"><table class="narrow"><thead><tr>{head}</thead>'
        f"<tbody>{''.join(lines)}</table></div>{datasheet}</section>"
    )
