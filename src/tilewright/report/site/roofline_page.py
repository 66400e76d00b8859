"""The roofline: every kernel under the rates that bound it, and the sweep from memory-bound to compute-bound."""

from __future__ import annotations

from html import escape
from typing import Any

from tilewright import hardware
from tilewright.record import is_stale
from tilewright.report.timings import TimingRow
from tilewright.report.site import components
from tilewright.report.site.components import Page, counted, rate, share, spaced, us

CHARTS = """<section><h2>The roofline</h2>
<form class="choices">
<label>GPU<select name="gpu"></select></label>
<label>Operation<select name="op"></select></label>
</form>
<div class="chart" id="chart"></div>
<p class="note">A mark is a kernel on a case: the operations that its cost counts, of the unit that needs most time for
them, by the bytes that must move and by the time it took. Filled marks are our kernels, hollow ones the baselines.
Roofs are the rates measured, thin ones those of the datasheet.</p></section>"""

SWEEP = """<section id="sweep"><h2>From memory-bound to compute-bound</h2>
<p>Every element is multiplied k times on its way. A multiplication is one of the two operations of a multiply-add:
its roof is half of fp32.</p>
<ul>{sentences}</ul>
<div class="chart" id="sweep-chart"></div></section>"""


def page(records: list[dict[str, Any]], found: list[TimingRow]) -> Page:
    """`records` has the sweeps and the ceilings, `found` the kernels."""
    measured = [r for r in records if r["kind"] in ("timing", "sweep")]
    sweeps = [r for r in measured if r["kind"] == "sweep"]
    names = components.device_names(measured)
    points = [_point(row) for row in found if row.arithmetic]
    uncounted = sum(bool(row.us) for row in found) - len(points)
    ceilings = {
        gpu: _roofs({unit: components.typical(values) for unit, values in units.items()})
        for gpu, units in components.ceilings(measured).items()
    }
    promised = {gpu: _roofs(hardware.DATASHEETS[gpu].rates()) for gpu in names if gpu in hardware.DATASHEETS}
    sentences = "".join(
        f"<li>{escape(sentence)}{' <mark>stale</mark>' if is_stale(r) else ''}"
        for r in sweeps
        if (sentence := turning_point(r))
    )
    left_out = f'<p class="note">{counted(uncounted, "timing")} of costs without operations are left out.</p>'
    body = [
        "<header><h1>Roofline</h1>",
        f"<p>What the hardware allows, and what each kernel reaches.</p></header>{CHARTS if names else ''}",
        "" if names else "<p>Nothing was measured.</p>",
        left_out if uncounted else "",
        SWEEP.format(sentences=sentences) if sweeps else "",
    ]
    data = {
        "page": "roofline",
        "gpus": names,
        "measured": ceilings,
        "datasheet": {
            gpu: {
                unit: value for unit, value in roofs.items() if unit in ceilings[gpu] or set(ceilings[gpu]) <= {"copy"}
            }
            for gpu, roofs in promised.items()
        },
        "points": points,
        "sweeps": [_sweep(r) for r in sweeps],
    }
    return Page("Roofline", "Roofline · Tilewright", "\n".join(body), data)


def _roofs(rates: dict[str, float]) -> dict[str, float]:
    """Those of memory and arithmetic, in tera."""
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
        f"{escape(spaced(row.case))}<br>{us(row.us or 0)} µs, {share(row.share)} of {escape(row.binds)}"
        f"{', stale' if row.is_stale else ''}<br>{rate(unit, row.per_second)} of {escape(unit)}, {row.intensity:.3g} a byte",
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
    """Where a sweep passes from the one roof to the other."""
    rates = hardware.rates(record["ceilings"], record["device"]["gpu"])
    points = sorted(record["points"], key=lambda p: p["k"])
    if not points or not rates.get("copy") or not rates.get("fp32"):
        return ""
    multiplying = rates["fp32"] / 2

    def by_memory(p: dict[str, Any]) -> str:
        moved = p["bytes"] / p["us"] * 1e6
        return f"{rate('copy', moved)}, {share(moved / rates['copy'])} of copy"

    def by_arithmetic(p: dict[str, Any]) -> str:
        done = p["flops"] / p["us"] * 1e6
        return f"{rate('fp32', done)}, {share(done / multiplying)} of half of fp32"

    last = points[-1]
    below = [p for p in points if p["flops"] / multiplying <= p["bytes"] / rates["copy"]]
    said = [f"memory binds up to k = {p['k']} ({by_memory(p)})" for p in below[-1:]]
    beyond = points[len(below) :]
    said += [f"arithmetic from k = {p['k']} on ({by_arithmetic(last)} at k = {last['k']})" for p in beyond[:1]]
    return f"{record['kernel']} on {record['device'].get('name', record['device']['gpu'])}: {', '.join(said)}."
