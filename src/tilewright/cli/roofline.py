"""The command `tilewright roofline`."""

from __future__ import annotations

import itertools
import json
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings
from tilewright.cli.options import AsJson, Fresh, RecordFile
from tilewright.cli.shared import (
    bottleneck,
    console,
    measure_ceilings,
    newest_records,
    progress,
    require_outputs,
    say_next,
    table,
    warn,
)
from tilewright.errors import NoRecords
from tilewright.report.formatting import digits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.report.timings import TimingRow

DEFAULT_UNITS = ("fp32", "tensor.bfloat16")  # drawn if no recorded kernel determines the units
LETTERS = string.ascii_uppercase + "ΓΔΘΛΞΠΣΦΨΩБДЖЗИЛЦЧШЭЮЯ"  # one per operation; lower case for baselines
OTHER_MARK, SWEEP_MARK = "*", "+"
WIDE = 120  # columns of a terminal in which the table shows FLOP/byte and TFLOP/s


@dataclass
class Roofline:
    """The ceilings of a GPU, the kernels recorded on it, and its sweep of arithmetic intensity."""

    gpu: str
    name: str
    ceilings: dict[str, float]  # measured
    when: str
    timings: list[dict[str, Any]]
    sweep: dict[str, Any] | None  # the record

    @property
    def rates(self) -> dict[str, float]:
        from tilewright.hardware import rates

        return rates(self.ceilings, self.gpu)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [*self.timings, *([self.sweep] if self.sweep else [])]


def roofline(
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw the records of this GPU; measure nothing.")
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Run or show the sweep of arithmetic intensity.")] = True,
    samples: Annotated[int, typer.Option(min=6, metavar="INTEGER", help="Samples per point of the sweep.")] = 30,
    fresh: Fresh = False,
    record: RecordFile = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the roofline of a GPU: its ceilings, the recorded kernels, and a sweep of arithmetic intensity.

    Without a GPU, or with --gpu, it is drawn from records, or else from the datasheet.
    """
    from tilewright import hardware
    from tilewright.record import append

    if record and not sweep:
        raise typer.BadParameter("--record writes the sweep; leave out --no-sweep.")
    require_outputs(record, html)
    is_here = gpu is None and hardware.has_gpu()
    with newest_records() as records:
        drawn = _measure(records, samples if sweep else None, fresh) if is_here else _from_records(records, gpu, sweep)
        if record and is_here:
            append(record, [drawn.sweep] if drawn.sweep else [])
        elif record:
            warn(f"nothing was measured, so nothing was written to {record}")
        if as_json:
            for line in _json_lines(drawn):
                print(json.dumps(line))
        else:
            _print(drawn)
        if html:
            _write_page(drawn, html)
    if not as_json:
        say_next(_what_next(html, record if is_here else None, is_here))


def _measure(records: list[dict[str, Any]], samples: int | None, fresh: bool) -> Roofline:
    from tilewright import hardware
    from tilewright.record import SWEEP, stamp
    from tilewright.source import file_hash
    from tilewright.timer import Timer
    from tilewright.workbench.bench import sweep as tool

    timer, device, swept = Timer(), hardware.current_gpu(), None
    ceilings = measure_ceilings(timer, fresh).rates
    if samples:
        with progress("running the sweep", None) as advance:
            advance("")
            points = [point.as_json() for point in tool.sweep(timer, samples)]
        content = {"elements": tool.ELEMENTS, "points": points, "ceilings": ceilings}
        versions = hardware.versions()
        swept = stamp("sweep", "sweep", "triton", file_hash(SWEEP), **content, device=device, versions=versions)
    timings = [r for r in records if r["kind"] == "timing" and r["device"]["gpu"] == device["gpu"]]
    return Roofline(device["gpu"], device["name"], ceilings, "measured now", timings, swept)


def _from_records(records: list[dict[str, Any]], gpu: str | None, with_sweep: bool) -> Roofline:
    from tilewright.hardware import datasheet

    measured = [r for r in records if r["kind"] in ("timing", "sweep")]
    count = Counter(r["device"]["gpu"] for r in measured)
    if not gpu and not count:
        raise NoRecords(settings.results_dir())
    name = gpu.lower() if gpu else count.most_common(1)[0][0]
    if name not in count:
        name = datasheet(name).name
    of_gpu = sorted((r for r in measured if r["device"]["gpu"] == name), key=lambda r: r["date"])
    ceilings = {unit: rate for r in of_gpu for unit, rate in r["ceilings"].items()}
    when = f"recorded, most recently on {of_gpu[-1]['date'][:10]}" if of_gpu else "from its datasheet (no records)"
    sweeps = [r for r in of_gpu if r["kind"] == "sweep" and with_sweep]
    timings = [r for r in of_gpu if r["kind"] == "timing"]
    full_name = of_gpu[-1]["device"]["name"] if of_gpu else name
    return Roofline(name, full_name, ceilings, when, timings, sweeps[-1] if sweeps else None)


def _kernels(drawn: Roofline) -> list[TimingRow]:
    from tilewright.report.timings import timing_rows

    return [row for row in timing_rows(drawn.timings) if row.arithmetic in drawn.rates]


def _mark_as_json(row: TimingRow) -> dict[str, Any]:
    about = {"op": row.op, "kernel": row.kernel, "case": row.parameters, "dtype": row.dtype, "direction": row.direction}
    place = {"unit": row.arithmetic, "intensity": row.intensity, "per_second": row.per_second}
    result = {"share": row.share, "bound_by": row.bound_by, "is_baseline": row.is_baseline, "stale": row.is_stale}
    return {"kind": "kernel", **about, **place, **result}


def _peaks(drawn: Roofline, kernels: list[TimingRow]) -> dict[str, float]:
    units = {unit for kernel in kernels for unit in kernel.cost.flops} or {*DEFAULT_UNITS}
    units |= {"fp32"} if drawn.sweep else set()
    return {unit: drawn.rates[unit] for unit in sorted(units) if unit in drawn.rates}


def _json_lines(drawn: Roofline) -> Iterator[dict[str, Any]]:
    from tilewright.record import is_stale

    kernels = _kernels(drawn)
    ceilings = {"copy": drawn.rates["copy"], **_peaks(drawn, kernels)}
    yield {
        "kind": "roofline",
        "gpu": drawn.gpu,
        "name": drawn.name,
        "ceilings": {unit: {"per_second": rate, "measured": unit in drawn.ceilings} for unit, rate in ceilings.items()},
    }
    yield from map(_mark_as_json, kernels)
    if drawn.sweep:
        yield {**drawn.sweep, "stale": is_stale(drawn.sweep)}


def _print(drawn: Roofline) -> None:
    from rich.text import Text

    out = console()
    kernels = _kernels(drawn)
    peaks = _peaks(drawn, kernels)
    out.print(Text.assemble((drawn.name, "bold"), f", {drawn.when}"))
    out.print(_ceilings(drawn, peaks))
    if peaks:
        out.print(Text(_plot(drawn, kernels, peaks, out.width)), no_wrap=True)
    if kernels:
        out.print("\nThe largest case of each operation: our fastest kernel, and the fastest baseline")
        out.print(_kernel_table(_largest(kernels), is_wide=out.width >= WIDE))
    if drawn.sweep:
        _print_sweep(drawn.sweep, out)


def _ceilings(drawn: Roofline, peaks: dict[str, float]) -> str:
    """List the measured ceilings, then those from the datasheet."""
    figures = {"copy": f"copy {_gb(drawn.rates['copy'])}", **{unit: f"{unit} {_tera(r)}" for unit, r in peaks.items()}}
    measured = [text for unit, text in figures.items() if unit in drawn.ceilings]
    peaks_only = [text for unit, text in figures.items() if unit not in drawn.ceilings]
    lines = [("Measured ceilings", measured), ("Datasheet peaks", peaks_only)]
    return "\n".join(f"{title}: {', '.join(texts)}" for title, texts in lines if texts) + "\n"


def _plot(drawn: Roofline, kernels: list[TimingRow], peaks: dict[str, float], width: int) -> str:
    from tilewright.report.ascii_roofline import Mark, roofline

    ops = sorted({kernel.op for kernel in kernels})
    letters = dict(zip(ops, LETTERS, strict=False))
    legend = {letter: op for op, letter in letters.items()}
    if others := ops[len(LETTERS) :]:
        legend[OTHER_MARK] = ", ".join(others)
    marks = []
    if drawn.sweep:
        legend[SWEEP_MARK] = "the sweep, whose ceiling is half of fp32"
        marks += [Mark(p["flops"] / p["bytes"], p["flops"] / p["us"] * 1e6, SWEEP_MARK) for p in drawn.sweep["points"]]
    for kernel in sorted(kernels, key=lambda kernel: not kernel.is_baseline):  # ours are drawn over baselines
        letter = letters.get(kernel.op, OTHER_MARK)
        marks.append(Mark(kernel.intensity, kernel.per_second, letter.lower() if kernel.is_baseline else letter))
    if any(kernel.is_baseline for kernel in kernels):
        legend["lower case:"] = "baseline"
    return roofline(drawn.rates["copy"], peaks, marks, legend, width)


def _largest(kernels: list[TimingRow]) -> list[TimingRow]:
    """Return our fastest kernel and the fastest baseline on the case with the most work of each op and direction."""
    by_case: dict[tuple[str, str], dict[tuple[str, str], list[TimingRow]]] = {}
    for row in kernels:
        by_case.setdefault((row.op, row.direction), {}).setdefault((row.case, row.dtype), []).append(row)
    chosen = []
    for _, cases in sorted(by_case.items(), key=lambda item: item[0][0]):
        largest = max(cases.values(), key=lambda group: group[0].cost.floor(group[0].rates)[1])
        for is_baseline in (False, True):
            group = [kernel for kernel in largest if kernel.is_baseline == is_baseline]
            chosen += [min(group, key=lambda kernel: kernel.us or 0)] if group else []
    return chosen


def _kernel_table(kernels: list[TimingRow], *, is_wide: bool) -> Table:
    from rich.text import Text

    numbers = ("time (us)", *(("FLOP/byte", "TFLOP/s") if is_wide else ()), "% of ceiling")
    shown = table("op", "case", "kernel", right=numbers, last=("bound by", ""))
    for (op, direction), group in itertools.groupby(kernels, key=lambda kernel: (kernel.op, kernel.direction)):
        name = op if direction == "forward" else f"{op} {direction}"
        for row in group:
            figures = (digits(row.intensity), digits(row.per_second / 1e12)) if is_wide else ()
            shown.add_row(
                name,
                f"{row.case} {row.dtype}".replace(",", ", ") if name else "",
                Text(row.kernel, "" if row.is_baseline else "bold"),
                digits(row.us),
                *figures,
                f"{row.share * 100:.0f}" if row.share else "",
                bottleneck(row.bound_by),
                Text("stale" if row.is_stale else "", "yellow"),
            )
            name = ""
    return shown


def _print_sweep(sweep: dict[str, Any], out: Console) -> None:
    """Print the points of the sweep beside the ceilings of its own run."""
    from tilewright.hardware import rates
    from tilewright.record import is_stale
    from tilewright.workbench.bench.sweep import Point, bend

    points = [Point(**p | {"interval_us": tuple(p["interval_us"])}) for p in sweep["points"]]
    stale = " (stale: the source changed)" if is_stale(sweep) else ""
    out.print(f"\nSweep of arithmetic intensity: x*2 repeated k times on {sweep['elements']} float32 elements{stale}")
    shown = table(right=("k", "time (us)", "95 % interval", "GB/s", "TFLOP/s"), last=("bound by",))
    ceilings = rates(sweep["ceilings"], sweep["device"]["gpu"])
    ceiling = ceilings["fp32"] / 2
    ridge = points[0].bytes / ceilings["copy"] * ceiling / sweep["elements"]
    for p in points:
        shown.add_row(
            str(p.k),
            digits(p.us),
            "{:.1f} to {:.1f}".format(*p.interval_us),
            digits(p.bytes / p.us / 1e3),
            digits(p.flops / p.us / 1e6),
            "memory" if p.k < ridge else "arithmetic",
        )
    out.print(shown)
    bends = bend(points)
    seen = f"The time starts to grow at k = {bends}" if bends else "The time never grows"
    out.print(
        f"{seen}; the ceilings predict it at k = {ridge:.0f}. "
        f"A multiplication is half of a fused multiply-add, so its ceiling is half of fp32: {_tera(ceiling)}.",
        soft_wrap=True,
    )


def _write_page(drawn: Roofline, path: Path) -> None:
    from tilewright.report.site import single_roofline

    if not drawn.records:
        raise typer.BadParameter(f"--html shows records, and {drawn.gpu} has none.")
    single_roofline(drawn.records, path)


def _what_next(html: Path | None, record: Path | None, is_here: bool) -> str:
    if html:
        return f"open {html} in a browser"
    if record:
        return f"the sweep is in {record}"
    return f"{'' if is_here else 'on a machine with a GPU: '}tilewright roofline --record FILE.jsonl"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"
