"""The page of one op: charts of time and share of the ceiling, and a table of every timing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from tilewright import source
from tilewright.cost import size
from tilewright.report.formatting import digits, percent
from tilewright.report.site import components
from tilewright.report.site.components import Page, count_of, spaced
from tilewright.report.timings import TimingRow

LOSSES_SHOWN = 6  # the others are folded
Link = Callable[[TimingRow], str]


class LineStyles:
    """A number for the line style of each kernel: the same on all pages, and unique among the kernels of an op."""

    def __init__(self, timings: Iterable[dict[str, Any]]) -> None:
        ops: dict[tuple[str, bool], set[str]] = {}  # by kernel and whether it is a baseline
        for r in timings:
            ops.setdefault((r["kernel"], r["is_baseline"]), set()).add(r["op"])
        known = [name for op in source.op_files() for name in source.kernels(op)]
        order = {name: place for place, name in reversed([*enumerate(known)])}
        slots: dict[tuple[str, bool], int] = {}
        for one in sorted(ops, key=lambda one: order.get(one[0], len(known))):
            taken = {slot for other, slot in slots.items() if other[1] == one[1] and ops[other] & ops[one]}
            slots[one] = next(slot for slot in itertools.count() if slot not in taken)
        self._styles = [{"name": name, "baseline": kind, "slot": slot} for (name, kind), slot in slots.items()]

    def of(self, rows: Sequence[TimingRow]) -> list[dict[str, Any]]:
        present = {(row.kernel, row.is_baseline) for row in rows}
        return [style for style in self._styles if (style["name"], style["baseline"]) in present]


def page(records: list[dict[str, Any]], rows: list[TimingRow], styles: LineStyles, raw: str) -> Page:
    """Return the page of these records, usually of one op; `raw` is the address of their JSON lines, in this order."""
    ops = list(dict.fromkeys(row.op for row in rows))
    name = ", ".join(ops) or "No records"
    gpus = components.device_names(records)
    timed = [row for row in rows if row.us]
    lines = {
        (r["op"], r["device"]["gpu"], r["direction"], r["dtype"], str(r["case"]), r["kernel"], r["date"]): number
        for number, r in enumerate(records, start=1)
    }

    def link(row: TimingRow) -> str:
        line = lines[row.op, row.gpu, row.direction, row.dtype, str(row.parameters), row.kernel, row.date]
        return f'<a href="{raw}">{line}</a>'

    file = source.op_files().get(name)
    stale = sum(row.is_stale for row in rows)
    throttled = sum(bool(row.throttled) for row in rows)
    facts = [
        count_of(len({(row.op, row.case) for row in rows}), "case"),
        count_of(len({row.kernel for row in rows}), "kernel"),
        count_of(len(timed), "timing"),
        f'<b class="stale">{stale:,} stale: the source changed after the measurement</b>' if stale else "",
        f'<b class="stale">{throttled:,} throttled</b>' if throttled else "",
        f'<a href="{raw}">records (JSON lines)</a>',
    ]
    body = [
        f"<header><h1>{escape(name)}</h1>",
        f"<p>{escape(source.read(file).summary)}</p>" if file else "",
        f"{_outcome(rows)}{components.facts(facts)}</header>",
        CHARTS.format(which_op=WHICH_OP if len(ops) > 1 else "") if timed else "",
        '<section id="timings"><h2>All timings</h2>',
        "" if timed else "<p>No timings.</p>",
        *(_table(group, of_group, gpus, link) for group, of_group in components.grouped(timed).items()),
        _untimed([row for row in rows if not row.us], link),
        "</section>",
        f"<section><h2>Environment</h2>{components.environments(records)}</section>" if records else "",
    ]
    return Page(name, f"{name} · Tilewright", "\n".join(body), _chart_data(timed, gpus, styles))


WHICH_OP = '<label>Operation<select name="op"></select></label>\n'
CHARTS = """<section><h2>Time and share of the ceiling</h2>
<form class="choices">
{which_op}<label>GPU<select name="gpu"></select></label>
<label>Direction<select name="direction"></select></label>
<label>Data type<select name="dtype"></select></label>
<label>Horizontal axis<select name="x"></select></label>
</form>
<div class="chart" id="chart"></div>
<p class="note">Error bars are 95 % confidence intervals of the median. Solid lines are our kernels, dashed grey lines
the baselines. Hollow marks are stale: the source changed after the measurement. Where another size changes along the
axis, its value stands in parentheses: compare times of equal sizes only, or read the share of the ceiling. Click a name
to hide its line, double-click to hide all others.</p></section>"""


def _outcome(rows: Iterable[TimingRow]) -> str:
    """Render how often our fastest kernel wins, and the cases it loses."""
    found = [one for group in components.grouped(rows).values() for one in components.outcomes(group)]
    if not found:
        return '<p class="verdict none">None of our kernels was timed</p>'
    items = components.losses(found)
    rest = "".join(items[LOSSES_SHOWN:])
    folded = f"<li><details><summary>{len(items) - LOSSES_SHOWN:,} more</summary><ul>{rest}</ul></details>"
    listed = f'<ul class="findings">{"".join(items[:LOSSES_SHOWN])}{folded if rest else ""}</ul>' if items else ""
    return f'<p class="verdict">Our fastest kernel: {components.counts(found)}</p>{listed}'


def _table(group: components.Group, rows: list[TimingRow], gpus: dict[str, str], link: Link) -> str:
    op, gpu, direction, dtype = group
    unit = rows[0].rate_unit if len({row.rate_unit for row in rows}) == 1 else ""
    against = next((row.speedup_over for row in rows if row.speedup_over), "")
    columns = (
        *("Time, µs", "95 % interval", unit or "Rate", "% of ceiling", f"Speedup over {escape(against or 'eager')}"),
        *("95 % interval", "Extra memory, MB", "Host, µs", "Verdict", "Result", "Record"),
    )
    head = "".join(f"<th>{name}" for name in columns)
    body = []
    for case, of_case in components.by_case(rows).items():
        cost, (limit, floor) = of_case[0].cost, of_case[0].cost.floor(of_case[0].rates)
        at_ceiling = f", {digits(floor * 1e6)} µs at the {escape(limit)} ceiling" if floor else ""
        lines = "".join(_line(row, link(row), unit, against) for row in of_case)
        body.append(
            f'<tbody><tr class="case"><th colspan="{len(columns) + 1}" scope="rowgroup"><span>{escape(spaced(case))} '
            f"<small>minimum: {size(cost.bytes)}{at_ceiling}</small></span>{lines}"
        )
    return (
        f"<h3>{escape(f'{op} {direction}, {dtype}, on {gpus[gpu]}')}</h3>"
        f'<div class="wide far"><table class="timings"><thead><tr><th>Kernel{head}</thead>{"".join(body)}</table></div>'
    )


def _line(row: TimingRow, link: str, unit: str, against: str | None) -> str:
    """Render one kernel; a rate or a baseline that the header does not name is named in the cell."""
    marks = "".join(f" <mark>{escape(mark)}</mark>" for mark in _marks(row))
    verdict = row.verdict if row.verdict == "right" else f'<b class="bad">{escape(row.verdict)}</b>'
    interval, speedup_interval = row.interval_us, row.speedup_interval
    other = f" <small>{escape(row.speedup_over or '')}</small>" if row.speedup_over != against else ""
    cells = (
        digits(row.us),
        f"{digits(interval[0])} – {digits(interval[1])}" if interval else "",
        digits(row.achieved) + ("" if unit else f" {row.rate_unit}"),
        percent(row.share),
        f"{row.speedup:.2f}{other}" if row.speedup else "",
        f"{speedup_interval[0]:.2f} – {speedup_interval[1]:.2f}" if speedup_interval else "",
        digits(row.extra_bytes / 1e6) if row.extra_bytes is not None else "",
        digits(row.host_us),
        verdict + marks,
        f'<span class="{row.place}">{row.place}</span>' if row.place else _loses(row),
        link,
    )
    kind = "baseline" if row.is_baseline else "own"
    return f'<tr class="{kind}"><th scope="row"><code>{escape(row.kernel)}</code><td>' + "<td>".join(cells)


def _loses(row: TimingRow) -> str:
    return f'<b class="bad">loses to {escape(row.loses_to.kernel)}</b>' if row.loses_to else ""


def _marks(row: TimingRow) -> list[str]:
    throttled = [f"throttled: {', '.join(row.throttled)}"] if row.throttled else []
    together = [f"{row.calls} calls back to back"] if row.calls > 1 else []
    return ["runs torch"] * row.runs_torch + ["stale"] * row.is_stale + throttled + together


def _untimed(rows: Iterable[TimingRow], link: Link) -> str:
    """List the kernels without a time, each with the reason and the cases."""
    together: dict[tuple[str, str, str], list[TimingRow]] = {}
    for row in rows:
        together.setdefault((row.kernel, row.verdict, row.reason), []).append(row)
    items = []
    for (kernel, verdict, reason), of_kernel in together.items():
        bad = "" if verdict == "unsupported" else ' class="bad"'
        cases = "; ".join(
            f"{escape(f'{row.op} {row.direction}, {row.dtype}, {spaced(row.case)}')} ({link(row)})" for row in of_kernel
        )
        items.append(
            f"<li><code>{escape(kernel)}</code> <b{bad}>{escape(verdict)}</b>{escape(f': {reason}' if reason else '')}"
            f"<details><summary>{count_of(len(of_kernel), 'case')}</summary><small>{cases}</small></details>"
        )
    return f'<h3>Not timed</h3><ul class="untimed">{"".join(items)}</ul>' if items else ""


def _chart_data(timed: list[TimingRow], gpus: dict[str, str], styles: LineStyles) -> dict[str, Any]:
    kernels = styles.of(timed)
    number = {(style["name"], style["baseline"]): n for n, style in enumerate(kernels)}
    return {
        "page": "op",
        "gpus": gpus,
        "kernels": kernels,
        "rows": [
            {
                "op": row.op,
                "gpu": row.gpu,
                "direction": row.direction,
                "dtype": row.dtype,
                "kernel": number[row.kernel, row.is_baseline],
                "parameters": row.parameters,
                "bytes": row.cost.bytes,
                "us": row.us,
                "interval": row.interval_us,
                "share": row.share,
                "stale": row.is_stale,
                "text": _hover_text(row),
            }
            for row in timed
        ],
    }


def _hover_text(row: TimingRow) -> str:
    """Return the tooltip of a mark, escaped, because Plotly renders markup in it."""
    interval = f" ({digits(row.interval_us[0])} – {digits(row.interval_us[1])})" if row.interval_us else ""
    result = row.place or (f"loses to {row.loses_to.kernel}" if row.loses_to else "")
    lines = [
        spaced(row.case),
        f"{digits(row.us)} µs{interval}",
        f"{digits(row.achieved)} {row.rate_unit}, {percent(row.share)} % of the {row.bound_by} ceiling",
        ", ".join([row.verdict, *_marks(row), *([result] if result else [])]),
    ]
    return "<br>".join([f"<b>{escape(row.kernel)}</b>", *map(escape, lines)])
