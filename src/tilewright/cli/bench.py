"""`tilewright bench`"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings, source
from tilewright.cli.check import check_and_print
from tilewright.cli.compare import compare_files
from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    Files,
    Kernels,
    cases_of,
    console,
    dtypes_of,
    exit_unless_good,
    load_op,
    op_names,
    progress,
    recorded,
    say_next,
)
from tilewright.cost import DIRECTIONS
from tilewright.errors import MissingPackage
from tilewright.record import append, is_stale, latest, read, require_writable, stamp

if TYPE_CHECKING:
    from tilewright.spec import Case, Kernel, Op
    from tilewright.timer import Timer
    from tilewright.workbench.bench import Timing

WANTED = {name: (name,) for name in DIRECTIONS} | {"all": DIRECTIONS}


def bench(
    op_name: Annotated[
        str | None,
        typer.Argument(metavar="[OP]", help="An operation, or several with commas between; all of them unless told."),
    ] = None,
    files: Files = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    direction: Annotated[
        str, typer.Option(help="forward, backward, both (in one call, as training does), or all three.")
    ] = "forward",
    against: Annotated[str, typer.Option(help="The kernel that speeds are held against.")] = "eager",
    samples: Annotated[int | None, typer.Option(min=6, help="Timed samples of each kernel; 50 unless told.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Also torch.compile after its longest search (compile-max): minutes more.")
    ] = False,
    sizes: Annotated[
        bool,
        typer.Option("--sizes", help="Instead of the bench cases 1 KiB to 4 GiB: torch's own, and what users call."),
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Time nothing: show what was recorded on this GPU, and its floor.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Append every timing to this file, as JSON lines.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with charts to this file.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW", help="Instead: what changed between two files of records; 1 if for the worse."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.0, help="With --compare: the share by which slower counts as slower.")
    ] = 0.02,
    as_json: AsJson = False,
) -> None:
    """How fast is it? Time every right kernel of OP, and those in FILEs, against the ceilings measured here.

    Without a GPU: check what can run here, and show the recorded timings.
    """
    if compare:
        if op_name or kernel or case or gpu or record or html:
            raise typer.BadParameter("--compare takes two files of records, --threshold and --json, and nothing else.")
        compare_files(*compare, threshold, as_json)
        return
    if direction not in WANTED:
        raise typer.BadParameter(f"'{direction}' is none of {', '.join(WANTED)}.")
    names = op_names(op_name)
    if not op_name and kernel:
        raise typer.BadParameter("not every operation has the same kernels: name those that --kernel is of.")
    if len(names) > 1 and (case or files):
        raise typer.BadParameter("--case and FILEs are of one operation: name it.")
    if sizes and (case or gpu or files):
        raise typer.BadParameter("--sizes makes its own cases and times what users call: no --case, --gpu or FILEs.")
    if gpu and files:
        raise typer.BadParameter("--gpu shows what was recorded, and of FILEs nothing is.")
    from tilewright import hardware

    if gpu:
        gpu = hardware.datasheet(gpu).name
    if record and html and record.resolve() == html.resolve():
        raise typer.BadParameter("--record and --html name one file: the page would replace the records.")
    for path in (record, html):
        if path:
            require_writable(path)
    if html and not importlib.util.find_spec("plotly"):
        raise MissingPackage("--html", "plotly")
    ops = [load_op(name, files) for name in names]
    _require_known(ops, kernel or [], against, files or [])
    cases, dtypes = cases_of(ops[0], case), dtypes_of(ops[0], dtype)
    asked = Asked(files or [], kernel or [], cases, dtypes, WANTED[direction], against, samples, search, sizes, as_json)
    if sizes:
        ops = [op for op in ops if op.shipped and op.sizes()]
        if not ops:
            raise typer.BadParameter(f"{op_name} has no size that could grow alone.")
    if gpu or not hardware.has_gpu():
        shown = _bench_recorded(ops, asked, gpu)
        if record:
            print(f"tilewright: nothing was timed, so nothing was recorded in {record}", file=sys.stderr)
    else:
        shown = _bench_here(ops, asked, record)
    if html:
        _write_page(shown.records, html)
    if not as_json:
        say_next(shown.next)
    if shown.was_stopped:
        raise typer.Exit(130)
    exit_unless_good(shown.found)


def _require_known(ops: list[Op], kernels: list[str], against: str, files: list[Path]) -> None:
    from tilewright import registry

    nowhere = [name for name in kernels if not any(_of(op, [name]) for op in ops)]
    is_file = against in [path.name for path in files]
    for op in ops:
        registry.pick(op, nowhere or _of(op, kernels) or kernels)
        registry.pick(op, [] if is_file else [against])


def _of(op: Op, kernels: list[str]) -> list[str]:
    """Those of the kernels that the op has: of several operations not all have the same."""
    from tilewright import registry

    return [name for name in kernels if name in registry.named(op)]


@dataclass
class Asked:
    """What the options say."""

    files: list[Path]
    kernels: list[str]
    cases: list[Case] | None
    dtypes: list[str] | None
    directions: tuple[str, ...]
    against: str
    samples: int | None
    searches: bool
    is_sized: bool
    as_json: bool


@dataclass
class Shown:
    """What was shown: records, what says whether all is good, and what to do next."""

    records: list[dict[str, Any]]
    found: list[Any]
    next: str
    was_stopped: bool = False


def _bench_here(ops: list[Op], asked: Asked, path: Path | None) -> Shown:
    from tilewright import hardware
    from tilewright.report import terminal
    from tilewright.report.timings import timing_rows
    from tilewright.timer import Timer
    from tilewright.workbench import bench as tool
    from tilewright.workbench.bench.gpu_state import others, watched

    entered = {op.name: _kernels(op, asked) for op in ops}
    if busy := others():
        print(f"tilewright: this GPU is not ours alone: {busy}; times may be too long", file=sys.stderr)
    timer = Timer()
    records, timings, was_stopped = [], [], False
    with progress("measuring this GPU's ceilings", None) as advance, watched() as state:
        advance("")
        ceilings = tool.measure(timer)
    context = {"ceilings": ceilings, "device": hardware.in_hand(), "versions": hardware.versions()}
    for op in ops:
        mine: list[dict[str, Any]] = []
        try:
            for timing in _timings(op, entered[op.name], asked, timer, context):
                timings.append(timing)
                mine.append(_record(timing, asked.files, context | ({"sized": True} if asked.is_sized else {})))
                if path:
                    append(path, mine[-1:])
                if asked.as_json:
                    print(json.dumps(mine[-1]), flush=True)
        except KeyboardInterrupt:
            was_stopped = True
        records += mine
        if mine and not asked.as_json:
            out = console()
            found = list(timing_rows(mine, sized=asked.is_sized))
            out.print(terminal.timings(found, f"{op.name} on {context['device']['name']}", out.width))
        if was_stopped:
            print(f"tilewright: stopped; the {len(records)} timings until then are kept", file=sys.stderr)
            break
    if not asked.as_json:
        console().print(terminal.conditions(records, state))
    where = f"{len(records)} records are in {path}" if path else f"{_again(ops)} --record FILE.jsonl"
    return Shown(records, timings, where, was_stopped)


def _kernels(op: Op, asked: Asked) -> list[Kernel]:
    """Those that take part: the named ones and what they are held against, or all, and libraries that are here."""
    from tilewright import registry

    if asked.is_sized and not asked.kernels:
        return registry.pick(op, ["eager", "compile", source.PUBLIC])
    kernels = registry.pick(op, _of(op, asked.kernels))
    if asked.searches and registry.SEARCHED not in asked.kernels:
        kernels.append(registry.searched(op))
    if not asked.kernels:
        kernels += registry.shipped(op).values()
        for peer in registry.peers(op).values():
            if package := registry.absent(peer):
                console(stderr=True).print(f"{peer.name} is not installed (pip install {package})", style="dim")
            else:
                kernels.append(peer)
    names = [kernel.name for kernel in kernels] + [path.name for path in asked.files]
    return kernels if asked.against in names else [*registry.pick(op, [asked.against]), *kernels]


def _timings(op: Op, kernels: list[Kernel], asked: Asked, timer: Timer, context: dict[str, Any]) -> Iterator[Timing]:
    from tilewright.workbench import bench as tool
    from tilewright.workbench.bench.runner import physical_seconds

    chosen = op.sizes() if asked.is_sized else asked.cases or op.bench
    dtypes = asked.dtypes or (op.bench_dtypes[:1] if asked.is_sized else op.bench_dtypes)
    cases = [c.with_dtype(d) for d in dtypes for c in chosen]
    total = tool.steps(kernels, asked.files, cases, asked.directions)
    with progress(f"timing {op.name}", total) as advance:
        yield from tool.bench(
            op,
            kernels,
            asked.files,
            clock=timer,
            cases=cases,
            directions=[d for d in asked.directions if d == "forward" or op.backward_cost],
            samples=asked.samples or tool.SAMPLES,
            against=asked.against,
            physical=physical_seconds(context["ceilings"], context["device"]),
            proven=_proven(op, context),
            on_step=advance,
        )


def _proven(op: Op, context: dict[str, Any]) -> set[str]:
    """Kernels that a recorded check found right as they stand, on such a GPU with these versions."""
    found = [r for path in settings.record_files() for r in read(path).records]
    return {
        r["kernel"]
        for r in latest([r for r in found if r["kind"] == "verdict" and r["op"] == op.name and "file" not in r])
        if r["verdict"] == "right"
        and not r.get("is_narrow")
        and r["device"].get("gpu") == context["device"]["gpu"]
        and all(r["versions"][name] == context["versions"][name] for name in ("torch", "triton"))
        and not is_stale(r)
    }


def _record(timing: Timing, files: list[Path], context: dict[str, Any]) -> dict[str, Any]:
    file = next((file for file in files if file.name == timing.kernel), None)
    source_hash = source.file_hash(file) if file else source.kernel_hash(timing.op, timing.kernel)
    extra = {"file": str(file)} if file else {}
    content = {k: v for k, v in timing.as_json().items() if k not in ("op", "kernel")}
    return stamp("timing", timing.op, timing.kernel, source_hash or "", **content, **context, **extra)


def _bench_recorded(ops: list[Op], asked: Asked, gpu: str | None) -> Shown:
    found: list[Any] = []
    is_checked = len(ops) == 1 and not gpu
    if not asked.as_json:
        why = "With --gpu nothing is timed" if gpu else "No GPU here, so nothing is timed"
        print(f"{why}: {'kernels are checked, and ' if is_checked else ''}recorded timings are shown.\n")
    if is_checked:
        found += check_and_print(ops[0], asked.files, asked.kernels, asked.cases, asked.dtypes, None, asked.as_json)
    points = [dict(case.point) for case in asked.cases or []]
    names = [op.name for op in ops]

    def is_wanted(r: dict[str, Any]) -> bool:
        return (
            r["kind"] == "timing"
            and r.get("sized", False) == asked.is_sized
            and r["op"] in names
            and r["direction"] in asked.directions
            and gpu in (None, r["device"]["gpu"])
            and (not points or r["case"] in points)
            and (not asked.dtypes or r["dtype"] in asked.dtypes)
        )

    with recorded() as records:
        found_here = [r for r in records if is_wanted(r)]
        shown = [r for r in found_here if not asked.kernels or r["kernel"] in asked.kernels]
        if asked.as_json:
            for r in shown:
                print(json.dumps({**r, "recorded": True, "stale": is_stale(r)}))
        else:
            for op in ops:
                _show_recorded(op, [r for r in found_here if r["op"] == op.name], asked.kernels)
            if asked.against != "eager":
                print("Recorded speeds are against eager: --against is for timings made here.")
        if gpu:
            _show_floors(ops, asked, gpu)
    then = f"on a machine with a GPU: {_again(ops)}" if gpu else f"{_again(ops)} --gpu a100-80gb"
    return Shown(shown, found, then)


def _show_recorded(op: Op, records: list[dict[str, Any]], kernels: list[str]) -> None:
    """All take part in who wins; those named are shown."""
    from tilewright.report import terminal
    from tilewright.report.timings import timing_rows

    if not records:
        print(f"\nNo such timings of {op.name} were recorded in {settings.results_dir()}.")
    for device in dict.fromkeys(r["device"]["name"] for r in records):
        here = [r for r in records if r["device"]["name"] == device]
        dates = sorted({r["date"][:10] for r in here})
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        sized = here[0].get("sized", False)
        chosen = [row for row in timing_rows(here, sized=sized) if not kernels or row.kernel in kernels]
        out = console()
        out.print(terminal.timings(chosen, f"\n{op.name}, RECORDED on {device}, {when}", out.width))
        console().print(terminal.conditions(here, {}))


def _show_floors(ops: list[Op], asked: Asked, gpu: str) -> None:
    """The least time of each case on a GPU that need not be here."""
    from tilewright import hardware
    from tilewright.report import terminal
    from tilewright.workbench.bench.runner import cost_of

    sheet = hardware.datasheet(gpu)
    floors = []
    for op in ops:
        cases = [c.with_dtype(d) for d in asked.dtypes or op.bench_dtypes for c in asked.cases or op.bench]
        for case in cases:
            for direction in asked.directions:
                cost = cost_of(op, case, direction)
                if cost.bytes:
                    unit, seconds = cost.floor(sheet.rates())
                    floors.append((op.name, case, direction, cost, unit, seconds))
    if asked.as_json:
        for name, case, direction, cost, unit, seconds in floors:
            about = {"op": name, "case": dict(case.point), "dtype": case.dtype, "direction": direction}
            print(json.dumps({"kind": "floor", "gpu": gpu, **about, "us": seconds * 1e6, "binds": unit, **vars(cost)}))
    else:
        console().print(
            terminal.floors(
                floors, f"\nThe floor on {gpu}: all bytes and all work of a case, at the rates of its datasheet"
            )
        )


def _write_page(records: list[dict[str, Any]], path: Path) -> None:
    from tilewright.report.site import single_op

    single_op(records, path)
    print(f"{path}: written", file=sys.stderr)


def _again(ops: list[Op]) -> str:
    names = [op.name for op in ops]
    return shlex.join(["tilewright", "bench", *([",".join(names)] if names != op_names(None) else [])])
