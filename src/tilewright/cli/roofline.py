"""`tilewright roofline`"""

from __future__ import annotations

import itertools
import json
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings
from tilewright.cli.shared import AsJson, console, progress, recorded, say_next
from tilewright.errors import NothingRecorded, UnknownGPU

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.report.timings import TimingRow

WITHOUT_RECORDS = ("fp32", "tensor.bfloat16")  # the units drawn where no recorded kernel says which it uses
SWEEP_MARK = "+"


@dataclass
class Roofline:
    """What is drawn: a GPU's ceilings, the kernels recorded on it, and its sweep."""

    gpu: str
    name: str
    ceilings: dict[str, float]  # those measured
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
    gpu: Annotated[str | None, typer.Option(help="Draw this GPU from what is recorded, and measure nothing.")] = None,
    sweep: Annotated[bool, typer.Option(help="Also run or show the intensity sweep.")] = True,
    samples: Annotated[int | None, typer.Option(min=6, help="Samples of each point of the sweep.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append the sweep to this file, as a JSON line.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the roofline as one HTML page, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """What bounds this GPU? Draw its measured ceilings with every recorded kernel, and multiply until it bends.

    Without a GPU, or with --gpu: from what is recorded, and by datasheet where nothing is.
    """
    from tilewright import hardware
    from tilewright.record import append, require_writable

    if record and not sweep:
        raise typer.BadParameter("--record keeps the sweep: leave out --no-sweep.")
    if record and html and record.resolve() == html.resolve():
        raise typer.BadParameter("--record and --html name one file: the page would replace the records.")
    for path in filter(None, (record, html)):
        require_writable(path)
    is_here = gpu is None and hardware.has_gpu()
    with recorded() as records:
        drawn = _measure(records, sweep, samples) if is_here else _from_records(records, gpu, sweep)
        if record and is_here:
            append(record, [drawn.sweep] if drawn.sweep else [])
        elif record:
            print(f"tilewright: nothing was measured, so nothing was recorded in {record}", file=sys.stderr)
        if as_json:
            for line in _json_lines(drawn):
                print(json.dumps(line))
        else:
            _show(drawn)
        if html:
            _write_page(drawn, html)
    if not as_json:
        say_next(_what_next(html, record if is_here else None, is_here))


def _measure(records: list[dict[str, Any]], with_sweep: bool, samples: int | None) -> Roofline:
    from tilewright import hardware
    from tilewright.record import SWEEP, stamp
    from tilewright.source import file_hash
    from tilewright.timer import Timer
    from tilewright.workbench.bench import measure
    from tilewright.workbench.bench import sweep as tool

    timer, device, taken = Timer(), hardware.in_hand(), None
    with progress("roofline", None) as advance:
        advance("measuring this GPU's ceilings")
        ceilings = measure(timer)
        if with_sweep:
            advance("running the sweep")
            points = [point.as_json() for point in tool.sweep(timer, samples or tool.SAMPLES)]
            content = {"elements": tool.ELEMENTS, "points": points, "ceilings": ceilings}
            versions = hardware.versions()
            taken = stamp("sweep", "sweep", "triton", file_hash(SWEEP), **content, device=device, versions=versions)
    timings = [r for r in records if r["kind"] == "timing" and r["device"]["gpu"] == device["gpu"]]
    return Roofline(device["gpu"], device["name"], ceilings, "measured now", timings, taken)


def _from_records(records: list[dict[str, Any]], gpu: str | None, with_sweep: bool) -> Roofline:
    from tilewright.hardware import DATASHEETS

    measured = [r for r in records if r["kind"] in ("timing", "sweep")]
    count = Counter(r["device"]["gpu"] for r in measured)
    if not gpu and not count:
        raise NothingRecorded(settings.results_dir())
    name = gpu.lower() if gpu else count.most_common(1)[0][0]
    if name not in count and name not in DATASHEETS:
        raise UnknownGPU(name, {*DATASHEETS, *count})
    of_gpu = sorted((r for r in measured if r["device"]["gpu"] == name), key=lambda r: r["date"])
    ceilings = {unit: rate for r in of_gpu for unit, rate in r["ceilings"].items()}
    when = f"RECORDED, last on {of_gpu[-1]['date'][:10]}" if of_gpu else "by its datasheet, since nothing is recorded"
    sweeps = [r for r in of_gpu if r["kind"] == "sweep" and with_sweep]
    timings = [r for r in of_gpu if r["kind"] == "timing"]
    full_name = of_gpu[-1]["device"]["name"] if of_gpu else name
    return Roofline(name, full_name, ceilings, when, timings, sweeps[-1] if sweeps else None)


def _kernels(drawn: Roofline) -> list[TimingRow]:
    from tilewright.report.timings import timing_rows

    return [row for row in timing_rows(drawn.timings) if row.arithmetic in drawn.rates]


def _mark_as_json(row: TimingRow) -> dict[str, Any]:
    about = {"op": row.op, "kernel": row.kernel, "case": row.point, "dtype": row.dtype, "direction": row.direction}
    place = {"unit": row.arithmetic, "intensity": row.intensity, "per_second": row.per_second}
    held = {"share": row.share, "binds": row.binds, "is_baseline": row.is_baseline, "stale": row.is_stale}
    return {"kind": "kernel", **about, **place, **held}


def _peaks(drawn: Roofline, kernels: list[TimingRow]) -> dict[str, float]:
    units = {unit for kernel in kernels for unit in kernel.cost.flops} or {*WITHOUT_RECORDS}
    units |= {"fp32"} if drawn.sweep else set()
    return {unit: drawn.rates[unit] for unit in sorted(units) if unit in drawn.rates}


def _json_lines(drawn: Roofline) -> Iterator[dict[str, Any]]:
    from tilewright.record import is_stale

    kernels = _kernels(drawn)
    roofs = {"copy": drawn.rates["copy"], **_peaks(drawn, kernels)}
    yield {
        "kind": "roofline",
        "gpu": drawn.gpu,
        "name": drawn.name,
        "roofs": {unit: {"per_second": rate, "measured": unit in drawn.ceilings} for unit, rate in roofs.items()},
    }
    yield from map(_mark_as_json, kernels)
    if drawn.sweep:
        yield {**drawn.sweep, "stale": is_stale(drawn.sweep)}


def _show(drawn: Roofline) -> None:
    from rich.text import Text

    out = console()
    kernels = _kernels(drawn)
    peaks = _peaks(drawn, kernels)
    out.print(f"[bold]{drawn.name}[/bold], {drawn.when}", highlight=False)
    out.print(_ceilings(drawn, peaks), highlight=False)
    if peaks:
        out.print(Text(_plot(drawn, kernels, peaks, out.width)), no_wrap=True)
    if kernels:
        out.print("\nOf each op, its largest case: the fastest of ours, and the fastest baseline")
        out.print(_kernel_table(_largest(kernels)))
    if drawn.sweep:
        _show_sweep(drawn.sweep, out.print)


def _ceilings(drawn: Roofline, peaks: dict[str, float]) -> str:
    """Which ceilings were measured, and which are those of the datasheet."""
    figures = {"copy": f"copy {_gb(drawn.rates['copy'])}", **{unit: f"{unit} {_tera(r)}" for unit, r in peaks.items()}}
    measured = [text for unit, text in figures.items() if unit in drawn.ceilings]
    by_datasheet = [text for unit, text in figures.items() if unit not in drawn.ceilings]
    said = [
        f"{', '.join(texts)} {how}" for texts, how in ((measured, "measured"), (by_datasheet, "by datasheet")) if texts
    ]
    return f"Ceilings: {'; '.join(said)}.\n"


def _plot(drawn: Roofline, kernels: list[TimingRow], peaks: dict[str, float], width: int) -> str:
    from tilewright.report.ascii_roofline import Mark, roofline

    ops = sorted({kernel.op for kernel in kernels})
    letters = dict(zip(ops, itertools.cycle(string.ascii_uppercase), strict=False))
    legend = {letters[op]: op for op in ops}
    marks = []
    if drawn.sweep:
        legend[SWEEP_MARK] = "the sweep, whose roof is half of fp32"
        marks += [Mark(p["flops"] / p["bytes"], p["flops"] / p["us"] * 1e6, SWEEP_MARK) for p in drawn.sweep["points"]]
    for kernel in sorted(kernels, key=lambda kernel: not kernel.is_baseline):  # ours are seen where marks meet
        letter = letters[kernel.op]
        marks.append(Mark(kernel.intensity, kernel.per_second, letter.lower() if kernel.is_baseline else letter))
    if any(kernel.is_baseline for kernel in kernels):
        legend["a small letter:"] = "a baseline"
    return roofline(drawn.rates["copy"], peaks, marks, legend, width)


def _largest(kernels: list[TimingRow]) -> list[TimingRow]:
    """Of each op and direction, on the case with the most work: the fastest of ours, then the fastest baseline."""
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


def _kernel_table(kernels: list[TimingRow]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("op", "case", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("time", "ops/byte", "TFLOP/s", "of ceiling"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("")
    for (op, direction), group in itertools.groupby(kernels, key=lambda kernel: (kernel.op, kernel.direction)):
        name = op if direction == "forward" else f"{op} {direction}"
        for row in group:
            table.add_row(
                name,
                f"{row.case} {row.dtype}" if name else "",
                Text(row.kernel, "" if row.is_baseline else "bold"),
                f"{row.us:.1f} us",
                f"{row.intensity:.4g}",
                f"{row.per_second / 1e12:.3g}",
                f"{row.share:.0%}" if row.share else "",
                row.binds,
                Text("stale" if row.is_stale else "", "yellow"),
            )
            name = ""
    return table


def _show_sweep(taken: dict[str, Any], say: Callable[..., None]) -> None:
    """Against the ceilings of its own run."""
    from rich.table import Table

    from tilewright.hardware import rates
    from tilewright.record import is_stale
    from tilewright.workbench.bench.sweep import Point, bend

    points = [Point(**p | {"interval_us": tuple(p["interval_us"])}) for p in taken["points"]]
    stale = ", stale: its source has changed since" if is_stale(taken) else ""
    say(f"\nThe sweep: x*2 repeated k times on {taken['elements']} elements of float32{stale}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("k", "time", "95 % of it", "GB/s", "TFLOP/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    ceilings = rates(taken["ceilings"], taken["device"]["gpu"])
    roof = ceilings["fp32"] / 2
    crossing = points[0].bytes / ceilings["copy"] * roof / taken["elements"]
    for p in points:
        table.add_row(
            str(p.k),
            f"{p.us:.1f} us",
            "{:.1f} to {:.1f}".format(*p.interval_us),
            f"{p.bytes / p.us / 1e3:.0f}",
            f"{p.flops / p.us / 1e6:.2f}",
            "memory" if p.k < crossing else "arithmetic",
        )
    say(table)
    bends = bend(points)
    seen = f"The time begins to grow at k = {bends}" if bends else "The time never grows"
    say(
        f"{seen}; by the ceilings, memory and arithmetic take as long at k = {crossing:.0f}. "
        f"A multiplication is one of the two operations of a multiply-add: its roof is half of fp32, {_tera(roof)}.",
        highlight=False,
    )


def _write_page(drawn: Roofline, path: Path) -> None:
    from tilewright.report.site import single_roofline

    if not drawn.records:
        raise typer.BadParameter(f"nothing is recorded of {drawn.gpu}, and --html shows records.")
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
