"""The page of one op: charts of time and share of the ceiling, and every number behind them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tilewright import source
from tilewright.cost import size
from tilewright.report.timings import TimingRow
from tilewright.report.site import components
from tilewright.report.site.components import Page, counted, share, spaced, us

SHOWN = 6  # losses before the rest is folded
COLUMNS = (
    *("Time, µs", "95 % interval", "Rate", "Of ceiling", "Speed", "95 % interval", "Extra memory", "Host, µs"),
    *("Verdict", "Place", "Raw line"),
)


class Looks:
    """The looks of each kernel's line, by a number: the same on all pages, and no two alike on one."""

    def __init__(self, timings: Iterable[dict[str, Any]]) -> None:
        ops: dict[tuple[str, bool], set[str]] = {}  # by kernel and whether it is a baseline
        for r in timings:
            ops.setdefault((r["kernel"], r["is_baseline"]), set()).add(r["op"])
        known = [name for op in source.op_files() for name in source.kernels(op)]
        order = {name: place for place, name in reversed([*enumerate(known)])}
        slots: dict[tuple[str, bool], int] = {}
        for one in sorted(ops, key=lambda one: order.get(one[0], len(known))):
            beside = {slot for other, slot in slots.items() if other[1] == one[1] and ops[other] & ops[one]}
            slots[one] = next(slot for slot in itertools.count() if slot not in beside)
        self._looks = [{"name": name, "baseline": kind, "slot": slot} for (name, kind), slot in slots.items()]

    def of(self, found: Sequence[TimingRow]) -> list[dict[str, Any]]:
        present = {(row.kernel, row.is_baseline) for row in found}
        return [look for look in self._looks if (look["name"], look["baseline"]) in present]


def page(records: list[dict[str, Any]], found: list[TimingRow], looks: Looks, raw: str) -> Page:
    """The page of these records, mostly of one op; `raw` is their address, one a line in this order."""
    ops = list(dict.fromkeys(row.op for row in found))
    name = ", ".join(ops) or "Nothing was recorded"
    gpus = components.device_names(records)
    timed = [row for row in found if row.us]
    lines = {
        (r["op"], r["device"]["gpu"], r["direction"], r["dtype"], str(r["case"]), r["kernel"], r["date"]): number
        for number, r in enumerate(records, start=1)
    }

    def link(row: TimingRow) -> str:
        line = lines[row.op, row.gpu, row.direction, row.dtype, str(row.point), row.kernel, row.date]
        return f'<a href="{raw}">{line}</a>'

    file = source.op_files().get(name)
    stale = sum(row.is_stale for row in found)
    throttled = sum(bool(row.throttled) for row in found)
    facts = [
        counted(len({(row.op, row.case) for row in found}), "case"),
        counted(len({row.kernel for row in found}), "kernel"),
        counted(len(timed), "timing"),
        f'<b class="stale">{stale:,} stale: the source has changed since</b>' if stale else "",
        f'<b class="stale">{throttled:,} throttled</b>' if throttled else "",
        f'<a href="{raw}">raw JSON lines</a>',
    ]
    body = [
        f"<header><h1>{escape(name)}</h1>",
        f"<p>{escape(source.read(file).summary)}</p>" if file else "",
        f"{_verdict(found)}{components.facts(facts)}</header>",
        CHARTS.format(which_op=WHICH_OP if len(ops) > 1 else "") if timed else "",
        '<section id="timings"><h2>All timings</h2>',
        "" if timed else "<p>Nothing was timed.</p>",
        *(_table(group, of_group, gpus, link) for group, of_group in components.grouped(timed).items()),
        _without_time([row for row in found if not row.us], link),
        f"</section><section><h2>Environment</h2>{components.environments(records)}</section>" if records else "</section>",
    ]
    return Page(name, f"{name} · Tilewright", "\n".join(body), _data(timed, gpus, looks))


WHICH_OP = '<label>Operation<select name="op"></select></label>\n'
CHARTS = """<section><h2>Time and share of the ceiling</h2>
<form class="choices">
{which_op}<label>GPU<select name="gpu"></select></label>
<label>Direction<select name="direction"></select></label>
<label>Data type<select name="dtype"></select></label>
<label>Against<select name="x"></select></label>
</form>
<div class="chart" id="chart"></div>
<p class="note">Bars are 95 % intervals of the median, where they were recorded. Solid lines are our kernels, broken
grey ones the baselines. Hollow marks are stale: the source has changed since. A click on a name hides its line, a
double click all others.</p></section>"""


def _verdict(found: Iterable[TimingRow]) -> str:
    """Who wins, and where ours loses."""
    of = [one for group in components.grouped(found).values() for one in components.outcomes(group)]
    if not of:
        return '<p class="verdict none">None of our kernels was timed</p>'
    items = components.losses(of)
    more = f"<li><details><summary>{len(items) - SHOWN:,} more</summary><ul>{''.join(items[SHOWN:])}</ul></details>"
    listed = f'<ul class="findings">{"".join(items[:SHOWN])}{more if len(items) > SHOWN else ""}</ul>' if items else ""
    kind = "bad" if items else "good" if any(one.rival for one in of) else "none"
    return f'<p class="verdict {kind}">Our best kernel: {components.counts(of)}</p>{listed}'


def _table(group: components.Group, of_group: list[TimingRow], gpus: dict[str, str], link: Any) -> str:
    op, gpu, direction, dtype = group
    head = "".join(f"<th>{name}" for name in COLUMNS)
    body = []
    for case, of_case in components.by_case(of_group).items():
        least, (unit, floor) = of_case[0].cost, of_case[0].cost.floor(of_case[0].rates)
        at_least = f"at least {size(least.bytes)}" + (f" and {us(floor * 1e6)} µs, by {escape(unit)}" if floor else "")
        body.append(
            f'<tbody><tr class="case"><th colspan="{len(COLUMNS) + 1}" scope="rowgroup"><span>{escape(spaced(case))} '
            f"<small>{at_least}</small></span>{''.join(_line(row, link(row)) for row in of_case)}"
        )
    return (
        f"<h3>{escape(f'{op} {direction}, {dtype}, on {gpus[gpu]}')}</h3>"
        f'<div class="wide far"><table class="timings"><thead><tr><th>Kernel{head}</thead>{"".join(body)}</table></div>'
    )


def _line(row: TimingRow, link: str) -> str:
    marks = "".join(f" <mark>{escape(mark)}</mark>" for mark in _marks(row))
    verdict = row.verdict if row.verdict == "right" else f'<b class="bad">{escape(row.verdict)}</b>'
    interval, ratio_interval = row.interval_us, row.ratio_interval
    cells = (
        us(row.us),
        f"{us(interval[0])} – {us(interval[1])}" if interval else "",
        row.rate,
        f"{share(row.share)} <small>{escape(row.binds)}</small>" if row.share else "",
        f"{row.ratio:.2f}x <small>{escape(row.against or '')}</small>" if row.ratio else "",
        f"{ratio_interval[0]:.2f} – {ratio_interval[1]:.2f}" if ratio_interval else "",
        size(row.extra_bytes) if row.extra_bytes is not None else "",
        us(row.host_us),
        verdict + marks,
        f'<span class="{row.place}">{row.place}</span>' if row.place else _loses(row),
        link,
    )
    kind = "baseline" if row.is_baseline else "own"
    return f'<tr class="{kind}"><th scope="row"><code>{escape(row.kernel)}</code><td>' + "<td>".join(cells)


def _loses(row: TimingRow) -> str:
    return f'<b class="bad">loses here to {escape(row.loses_to.kernel)}</b>' if row.loses_to else ""


def _marks(row: TimingRow) -> list[str]:
    throttled = [f"throttled: {', '.join(row.throttled)}"] if row.throttled else []
    together = [f"{row.calls} calls back to back"] if row.calls > 1 else []
    return ["by torch"] * row.is_torchs + ["stale"] * row.is_stale + throttled + together


def _without_time(untimed: Iterable[TimingRow], link: Any) -> str:
    """Kernels that have none, each with its reason and the cases it holds for."""
    together: dict[tuple[str, str, str], list[TimingRow]] = {}
    for row in untimed:
        together.setdefault((row.kernel, row.verdict, row.reason), []).append(row)
    items = []
    for (kernel, verdict, reason), of_kernel in together.items():
        bad = "" if verdict == "unsupported" else ' class="bad"'
        cases = "; ".join(
            f"{escape(f'{row.op} {row.direction}, {row.dtype}, {spaced(row.case)}')} ({link(row)})" for row in of_kernel
        )
        items.append(
            f"<li><code>{escape(kernel)}</code> <b{bad}>{escape(verdict)}</b>{escape(f': {reason}' if reason else '')}"
            f"<details><summary>{counted(len(of_kernel), 'record')}</summary><small>{cases}</small></details>"
        )
    return f'<h3>Without a time</h3><ul class="untimed">{"".join(items)}</ul>' if items else ""


def _data(timed: list[TimingRow], gpus: dict[str, str], looks: Looks) -> dict[str, Any]:
    kernels = looks.of(timed)
    number = {(look["name"], look["baseline"]): n for n, look in enumerate(kernels)}
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
                "point": row.point,
                "bytes": row.cost.bytes,
                "us": row.us,
                "interval": row.interval_us,
                "share": row.share,
                "stale": row.is_stale,
                "text": _hover(row),
            }
            for row in timed
        ],
    }


def _hover(row: TimingRow) -> str:
    """What is said where the pointer is: markup of the plotting library, so that names are escaped."""
    interval = f" ({us(row.interval_us[0])} – {us(row.interval_us[1])})" if row.interval_us else ""
    place = row.place or (f"loses here to {row.loses_to.kernel}" if row.loses_to else "")
    said = [
        spaced(row.case),
        f"{us(row.us)} µs{interval}",
        f"{row.rate}, {share(row.share)} of {row.binds}",
        ", ".join([row.verdict, *_marks(row), *([place] if place else [])]),
    ]
    return "<br>".join([f"<b>{escape(row.kernel)}</b>", *map(escape, said)])
