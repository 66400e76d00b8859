"""The command `tilewright bench`."""

from __future__ import annotations

import importlib.util
import json
import shlex
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings, source
from tilewright.cli.bench_random import RandomPlan, bench_random
from tilewright.cli.check import check_and_print
from tilewright.cli.options import AsJson, CallOptions, Fresh, OpNames, RecordFile, flattened
from tilewright.cli.selection import code_hash, load_target, next_words, refuse_for_operations, select_kernels
from tilewright.cli.shared import (
    console,
    exit_unless_correct,
    measure_ceilings,
    newest_records,
    op_names,
    parse_cases,
    parse_dtypes,
    progress,
    require_choice,
    require_outputs,
    say_next,
    warn,
)
from tilewright.cost import DIRECTIONS
from tilewright.errors import MissingPackage
from tilewright.record import append, is_stale, latest, read, stamp

if TYPE_CHECKING:
    from tilewright.spec import Case, Kernel, Op
    from tilewright.timer import Timer
    from tilewright.workbench.bench import Timing

CHOICES = {name: (name,) for name in DIRECTIONS} | {"all": DIRECTIONS}


@flattened
def bench(
    ctx: typer.Context,
    *,
    op_name: OpNames = None,
    options: CallOptions,
    direction: Annotated[
        str,
        typer.Option("--direction", metavar="DIRECTION", help="forward, backward, both (in one call), or all three."),
    ] = "forward",
    against: Annotated[str, typer.Option(metavar="NAME", help="Kernel that speedups are relative to.")] = "eager",
    samples: Annotated[int, typer.Option(min=6, metavar="INTEGER", help="Samples per kernel.")] = 50,
    search: Annotated[
        bool, typer.Option("--search", help="Also time torch.compile with max-autotune. Takes minutes.")
    ] = False,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Time sizes from 1 KiB to 4 GiB instead of the bench cases.")
    ] = False,
    random: Annotated[
        int | None,
        typer.Option(min=1, metavar="INTEGER", help="Time this many cases drawn at random, over all named operations."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="INTEGER", help="Seed of --random.")] = 0,
    captured: Annotated[
        bool, typer.Option("--captured", help="Draw small cases for --random, and time them in CUDA graphs.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, metavar="MINUTES", help="Start no case of --random after this time.")
    ] = None,
    lists: Annotated[bool, typer.Option("--list", help="List the cases of --random; time nothing.")] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show the recorded timings of this GPU; time nothing.")
    ] = None,
    fresh: Fresh = False,
    record: RecordFile = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with charts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels and compare them with the measured ceilings of this GPU. Only correct kernels are timed.

    Without a GPU, check the kernels that can run here and show the recorded timings.
    """
    from tilewright import hardware

    require_choice("--direction", direction, CHOICES)
    names, files = op_names(op_name), options.files or []
    refuse_for_operations(ctx, names[0] if len(names) == 1 else None)
    if not op_name and options.kernel:
        raise typer.BadParameter("--kernel needs an OP: not every operation has the same kernels.")
    if len(names) > 1 and (options.case or files):
        raise typer.BadParameter("--case and FILE need one OP.")
    if sizes and (options.case or gpu or files):
        raise typer.BadParameter("--sizes has its own cases and kernels; leave out --case, --gpu and FILE.")
    if random and (sizes or options.case or options.kernel or options.dtype or gpu or files):
        raise typer.BadParameter("--random draws its own cases, dtypes and kernels, of our operations.")
    if not random and (lists or time_limit or captured or seed):
        raise typer.BadParameter("--seed, --list, --time-limit and --captured belong to --random.")
    if captured and direction != "forward":
        raise typer.BadParameter("--captured times forward calls; leave out --direction.")
    if gpu and files:
        raise typer.BadParameter("--gpu shows recorded timings, and those of a FILE are not recorded.")
    if gpu:
        gpu = hardware.datasheet(gpu).name
    require_outputs(record, html)
    if html and not importlib.util.find_spec("plotly"):
        raise MissingPackage("--html", "plotly")
    ops = [load_target(name, options) for name in names]
    if random:
        plan = RandomPlan(random, seed, CHOICES[direction], samples, captured, time_limit, lists, as_json)
        bench_random(ops, plan, record, fresh)
        return
    _require_known(ops, options.kernel or [], against, files)
    plan = Plan(
        files=files,
        kernels=options.kernel or [],
        cases=parse_cases(ops[0], options.case),
        dtypes=parse_dtypes(ops[0], options.dtype),
        directions=CHOICES[direction],
        against=against,
        samples=samples,
        max_autotune=search,
        is_sized=sizes,
        as_json=as_json,
    )
    if sizes:
        ops = [op for op in ops if op.shipped and op.sizes()]
        if not ops:
            raise typer.BadParameter(f"--sizes: {op_name} has no size that can vary by itself.")
    if gpu or not hardware.has_gpu():
        result = _show_records(ops, plan, gpu, shlex.join(["tilewright", *next_words(names[0], options)]))
        if record:
            warn(f"nothing was timed, so nothing was written to {record}")
    else:
        result = _time(ops, plan, record, fresh)
    if html:
        from tilewright.report.site import single_op

        single_op(result.records, html)
        warn(f"wrote {html}")
    if not as_json:
        say_next(result.next)
    if result.was_interrupted:
        raise typer.Exit(130)
    exit_unless_correct(result.verdicts)


def _require_known(ops: list[Op], kernels: list[str], against: str, files: list[Path]) -> None:
    from tilewright import registry

    unknown = [name for name in kernels if not any(_available(op, [name]) for op in ops)]
    is_file = against in [path.name for path in files]
    for op in ops:
        registry.pick(op, unknown or _available(op, kernels) or kernels)
        registry.pick(op, [] if is_file else [against])


def _available(op: Op, kernels: list[str]) -> list[str]:
    """Return those of the kernels that the operation has."""
    from tilewright import registry

    return [name for name in kernels if name in registry.named(op)]


@dataclass(frozen=True)
class Plan:
    """The kernels and cases to time, and how."""

    files: list[Path]
    kernels: list[str]
    cases: list[Case] | None
    dtypes: list[str] | None
    directions: tuple[str, ...]
    against: str
    samples: int
    max_autotune: bool
    is_sized: bool
    as_json: bool


@dataclass
class Result:
    """The records that were printed, the verdicts that decide the exit code, and the next command."""

    records: list[dict[str, Any]]
    verdicts: list[Any]
    next: str
    was_interrupted: bool = False


def _time(ops: list[Op], plan: Plan, path: Path | None, fresh: bool) -> Result:
    from tilewright import hardware
    from tilewright.report import terminal
    from tilewright.report.timings import timing_rows
    from tilewright.timer import Timer
    from tilewright.workbench.bench.gpu_state import other_users

    kernels = {op.name: _select_kernels(op, plan) for op in ops}
    if busy := other_users():
        warn(f"this GPU is shared: {busy}; times may be too long")
    timer = Timer()
    ceilings = measure_ceilings(timer, fresh)
    context: dict[str, Any] = {"run": uuid.uuid4().hex, "ceilings": ceilings.rates}
    context |= {"device": hardware.current_gpu(), "versions": hardware.versions()}
    if plan.is_sized:
        context["sized"] = True
    result = Result([], [], f"{_command(ops)} --record FILE.jsonl")
    for op in ops:
        mine: list[dict[str, Any]] = []
        try:
            for timing in _timings(op, kernels[op.name], plan, timer, context):
                result.verdicts.append(timing)
                mine.append(_record(timing, op, plan.files, context))
                if path:
                    append(path, mine[-1:])
                if plan.as_json:
                    print(json.dumps(mine[-1]), flush=True)
        except KeyboardInterrupt:
            result.was_interrupted = True
        result.records += mine
        if mine and not plan.as_json:
            out = console()
            found = list(timing_rows(mine, sized=plan.is_sized))
            out.print(terminal.timings(found, f"{op.name} on {context['device']['name']}", out.width))
        if result.was_interrupted:
            warn(f"interrupted; {len(result.records)} timings were completed")
            break
    if not plan.as_json:
        console().print(terminal.conditions(result.records, ceilings.state))
    if path:
        result.next = f"{len(result.records)} records are in {path}"
    return result


def _select_kernels(op: Op, plan: Plan) -> list[Kernel]:
    """Return the named kernels and the baseline; by default all kernels and the peers that are installed."""
    from tilewright import registry

    if plan.is_sized and not plan.kernels:
        return registry.pick(op, ["eager", "compile", source.PUBLIC])
    named = _available(op, plan.kernels)
    kernels = registry.pick(op, named) if named or not op.file else select_kernels(op, [], plan.files)
    if op.file and not named:
        kernels = [*registry.pick(op, ["eager", "compile"]), *kernels]
    if plan.max_autotune and registry.SEARCHED not in plan.kernels:
        kernels.append(registry.searched(op))
    if not plan.kernels:
        kernels += registry.shipped(op).values()
        peers = list(registry.peers(op).values()) if op.file is None else []
        absent = {peer.name: package for peer in peers if (package := registry.absent(peer))}
        if absent:
            names, packages = ", ".join(absent), " ".join(dict.fromkeys(absent.values()))
            console(stderr=True).print(f"not installed: {names} (pip install {packages})", style="dim")
        kernels += [peer for peer in peers if peer.name not in absent]
    names = [kernel.name for kernel in kernels] + [path.name for path in plan.files]
    return kernels if plan.against in names else [*registry.pick(op, [plan.against]), *kernels]


def _timings(op: Op, kernels: list[Kernel], plan: Plan, timer: Timer, context: dict[str, Any]) -> Iterator[Timing]:
    from tilewright.workbench import bench as tool
    from tilewright.workbench.bench.runner import physical_seconds

    chosen = op.sizes() if plan.is_sized else plan.cases or op.bench
    dtypes = plan.dtypes or (op.bench_dtypes[:1] if plan.is_sized else op.bench_dtypes)
    cases = [c.with_dtype(d) for d in dtypes for c in chosen]
    total = tool.step_count(kernels, plan.files, cases, plan.directions)
    with progress(f"timing {op.name}", total) as advance:
        yield from tool.bench(
            op,
            kernels,
            plan.files,
            clock=timer,
            cases=cases,
            directions=[d for d in plan.directions if d == "forward" or op.backward_cost],
            samples=plan.samples,
            against=plan.against,
            physical=physical_seconds(context["ceilings"], context["device"]),
            proven=_proven(op, context),
            on_step=advance,
        )


def _proven(op: Op, context: dict[str, Any]) -> set[str]:
    """Return the kernels that a recorded check of the current code found correct on this GPU with these versions."""
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


def _record(timing: Timing, op: Op, files: list[Path], context: dict[str, Any]) -> dict[str, Any]:
    file = next((file for file in files if file.name == timing.kernel), op.file)
    source_hash = source.file_hash(file) if file else code_hash(op, timing.kernel)
    extra = {"file": str(file)} if file else {}
    content = {k: v for k, v in timing.as_json().items() if k not in ("op", "kernel")}
    return stamp("timing", timing.op, timing.kernel, source_hash, **content, **context, **extra)


def _show_records(ops: list[Op], plan: Plan, gpu: str | None, explain: str) -> Result:
    checked = not gpu and len(ops) == 1
    if not gpu and not plan.as_json:
        what = "kernels are checked, and recorded timings are shown" if checked else "recorded timings are shown"
        print(f"No GPU found, so nothing is timed: {what}.\n")
    verdicts: list[Any] = []
    if checked:
        verdicts += check_and_print(ops[0], plan.files, plan.kernels, plan.cases, plan.dtypes, None, plan.as_json)
    points = [dict(case.point) for case in plan.cases or []]
    names = [op.name for op in ops]

    def is_selected(r: dict[str, Any]) -> bool:
        return (
            r["kind"] == "timing"
            and r.get("sized", False) == plan.is_sized
            and r["op"] in names
            and r["direction"] in plan.directions
            and gpu in (None, r["device"]["gpu"])
            and (not points or r["case"] in points)
            and (not plan.dtypes or r["dtype"] in plan.dtypes)
        )

    with newest_records() as records:
        selected = [r for r in records if is_selected(r)]
        shown = [r for r in selected if not plan.kernels or r["kernel"] in plan.kernels]
        if plan.as_json:
            for r in shown:
                print(json.dumps({**r, "recorded": True, "stale": is_stale(r)}))
        else:
            for op in ops:
                _print_records(op, [r for r in selected if r["op"] == op.name], plan.kernels)
            if plan.against != "eager":
                print("Recorded speedups are against eager; --against applies to new timings.")
    floor = explain if ops[0].file else f"tilewright floor {ops[0].name} --gpu a100-80gb"
    return Result(shown, verdicts, floor if checked else f"on a machine with a GPU: {_command(ops)}")


def _print_records(op: Op, records: list[dict[str, Any]], kernels: list[str]) -> None:
    """Print a table per GPU. All kernels compete for the best time; only the named ones are shown."""
    from tilewright.report import terminal
    from tilewright.report.timings import timing_rows

    if not records:
        print(f"\nNo matching timings of {op.name} in {settings.results_dir()}.")
    for device in dict.fromkeys(r["device"]["name"] for r in records):
        here = [r for r in records if r["device"]["name"] == device]
        dates = sorted({r["date"][:10] for r in here})
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        sized = here[0].get("sized", False)
        chosen = [row for row in timing_rows(here, sized=sized) if not kernels or row.kernel in kernels]
        out = console()
        out.print(terminal.timings(chosen, f"\n{op.name}, recorded on {device}, {when}", out.width))
        out.print(terminal.conditions(here, {}))


def _command(ops: list[Op]) -> str:
    names = [op.name for op in ops]
    return shlex.join(["tilewright", "bench", *([",".join(names)] if names != op_names(None) else [])])
