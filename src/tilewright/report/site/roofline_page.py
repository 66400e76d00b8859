"""The roofline of every kernel, and the sweep from memory-bound to compute-bound."""

from __future__ import annotations

from html import escape
from typing import Any

from tilewright import hardware
from tilewright.record import is_stale
from tilewright.report.formatting import digits, percent, rate
from tilewright.report.site import components
from tilewright.report.site.components import Page, count_of, spaced
from tilewright.report.timings import TimingRow

CHARTS = """<section><h2>The roofline</h2>
<form class="choices">
<label>GPU<select name="gpu"></select></label>
<label>Operation<select name="op"></select></label>
</form>
<div class="chart" id="chart"></div>
<p class="note">A mark is a kernel on a case. Its operations are those of the arithmetic unit that needs the most time
for the case, its bytes the minimum traffic. Filled marks are our kernels, hollow marks the baselines. Thick lines are
measured ceilings, thin dotted lines datasheet peaks.</p></section>"""

SWEEP = """<section id="sweep"><h2>From memory-bound to compute-bound</h2>
<p>Each element is loaded, multiplied k times and stored. A multiplication is half of a fused multiply-add, so its
ceiling is half of the fp32 ceiling.</p>
<ul>{sentences}</ul>
<div class="chart" id="sweep-chart"></div></section>"""


def page(records: list[dict[str, Any]], found: list[TimingRow]) -> Page:
    """Return the page; `records` has the sweeps and the ceilings, `found` the kernels."""
    measured = [r for r in records if r["kind"] in ("timing", "sweep")]
    sweeps = [r for r in measured if r["kind"] == "sweep"]
    names = components.device_names(measured)
    points = [_point(row) for row in found if row.arithmetic]
    uncounted = sum(bool(row.us) for row in found) - len(points)
    ceilings = {
        gpu: _drawn({unit: components.typical(values) for unit, values in units.items()})
        for gpu, units in components.ceilings(measured).items()
    }
    peaks = {gpu: _drawn(hardware.DATASHEETS[gpu].rates()) for gpu in names if gpu in hardware.DATASHEETS}
    sentences = "".join(
        f"<li>{escape(sentence)}{' <mark>stale</mark>' if is_stale(r) else ''}"
        for r in sweeps
        if (sentence := turning_point(r))
    )
    left_out = f'<p class="note">Not shown: {count_of(uncounted, "timing")} of operations without arithmetic.</p>'
    body = [
        "<header><h1>Roofline</h1>",
        "<p>The arithmetic rate of each kernel beside the limit of the hardware.</p></header>",
        CHARTS if names else "<p>No timings.</p>",
        left_out if uncounted else "",
        SWEEP.format(sentences=sentences) if sweeps else "",
    ]
    data = {
        "page": "roofline",
        "gpus": names,
        "measured": ceilings,
        "datasheet": {
            gpu: {
                unit: value for unit, value in rates.items() if unit in ceilings[gpu] or set(ceilings[gpu]) <= {"copy"}
            }
            for gpu, rates in peaks.items()
        },
        "points": points,
        "sweeps": [_sweep(r) for r in sweeps],
    }
    return Page("Roofline", "Roofline · Tilewright", "\n".join(body), data)


def _drawn(rates: dict[str, float]) -> dict[str, float]:
    """Return the rates of memory and arithmetic that the chart shows, in units of 10^12."""
    drawn = (unit for unit in rates if unit in ("copy", "fp32", "special") or unit.startswith("tensor."))
    return {unit: rates[unit] / 1e12 for unit in drawn}


def _point(row: TimingRow) -> dict[str, Any]:
    unit = row.arithmetic or ""
    return {
        "gpu": row.gpu,
        "op": row.op,
        "baseline": row.is_baseline,
        "x": row.intensity,
        "y": row.per_second / 1e12,
        "text": f"<b>{escape(row.kernel)}</b> {escape(f'{row.op} {row.direction}, {row.dtype}')}<br>"
        f"{escape(spaced(row.case))}<br>"
        f"{digits(row.us)} µs, {percent(row.share)} % of the {escape(row.bound_by)} ceiling"
        f"{', stale' if row.is_stale else ''}<br>"
        f"{rate(unit, row.per_second)} ({escape(unit)}), {row.intensity:.3g} per byte",
    }


def _sweep(record: dict[str, Any]) -> dict[str, Any]:
    points = record["points"]
    return {
        "kernel": record["kernel"],
        "gpu": record["device"]["gpu"],
        "k": [p["k"] for p in points],
        "us": [p["us"] for p in points],
        "interval": [p.get("interval_us") for p in points],
        "gigabytes": [p["bytes"] / p["us"] / 1e3 for p in points],
        "teraflops": [p["flops"] / p["us"] / 1e6 for p in points],
    }


def turning_point(record: dict[str, Any]) -> str:
    """Describe where a sweep turns from memory-bound to compute-bound."""
    rates = hardware.rates(record["ceilings"], record["device"]["gpu"])
    points = sorted(record["points"], key=lambda p: p["k"])
    if not points or not rates.get("copy") or not rates.get("fp32"):
        return ""
    multiplying = rates["fp32"] / 2

    def by_memory(p: dict[str, Any]) -> str:
        moved = p["bytes"] / p["us"] * 1e6
        return f"{rate('copy', moved)}, {percent(moved / rates['copy'])} % of the copy ceiling"

    def by_arithmetic(p: dict[str, Any]) -> str:
        done = p["flops"] / p["us"] * 1e6
        return f"{rate('fp32', done)}, {percent(done / multiplying)} % of half the fp32 ceiling"

    last = points[-1]
    below = [p for p in points if p["flops"] / multiplying <= p["bytes"] / rates["copy"]]
    parts = [f"memory-bound up to k = {p['k']} ({by_memory(p)})" for p in below[-1:]]
    beyond = points[len(below) :]
    parts += [f"compute-bound from k = {p['k']} ({by_arithmetic(last)} at k = {last['k']})" for p in beyond[:1]]
    return f"{record['kernel']} on {record['device'].get('name', record['device']['gpu'])}: {', '.join(parts)}."
