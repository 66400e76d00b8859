"""The command `tilewright bench --random`."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright import source
from tilewright.cli.shared import console, measure_ceilings, newest_records, progress, say_next, table, warn
from tilewright.record import append, stamp

if TYPE_CHECKING:
    from tilewright.spec import Kernel, Op
    from tilewright.workbench.bench import Timing
    from tilewright.workbench.bench.drawn import DrawnCase

SECONDS_PER_CASE = 0.9  # and direction
MEMORY = 0.9  # the share of the free memory that cases may need: the compilers need some too


@dataclass(frozen=True)
class RandomPlan:
    """The cases to draw, and how to time them."""

    count: int
    seed: int
    directions: tuple[str, ...]
    samples: int
    captured: bool  # small cases in a CUDA graph
    minutes: float | None  # after which no further case is begun
    lists: bool  # list the cases, time nothing
    as_json: bool

    def command(self, ops: list[Op]) -> str:
        names = [op.name for op in ops]
        given = "" if names == list(source.op_files()) else ",".join(names) + " "
        captured = " --captured" if self.captured else ""
        return f"tilewright bench {given}--random {self.count} --seed {self.seed}{captured}"


def bench_random(ops: list[Op], plan: RandomPlan, record: Path | None, fresh: bool) -> None:
    """Draw cases and time them; without a GPU, show recorded results or list the cases."""
    from tilewright import hardware
    from tilewright.workbench.bench.drawn import draw_from

    has_gpu = hardware.has_gpu()
    if has_gpu and not plan.lists:
        from tilewright.worker.memory import free_memory

        cases, left_out = draw_from(
            ops, plan.count, plan.seed, memory=int(MEMORY * free_memory()[0]), small=plan.captured
        )
        _warn_of(left_out)
        _time(ops, cases, plan, record, fresh)
        return
    if record:
        warn(f"nothing is timed, so nothing is written to {record}")
    names = [op.name for op in ops]
    with newest_records() as found:
        recorded = [r for r in found if r["kind"] == "random" and r["op"] in names]
        recorded = [r for r in recorded if r["seed"] == plan.seed and r.get("captured", False) == plan.captured]
    if recorded and not plan.lists:
        _show(recorded, plan.as_json)
        return
    cases, left_out = draw_from(ops, plan.count, plan.seed, small=plan.captured)
    _warn_of(left_out)
    _list(cases, plan)
    if not has_gpu and not plan.as_json:
        say_next(f"timing needs a GPU: {plan.command(ops)}")


def _warn_of(left_out: list[str]) -> None:
    for reason in left_out:
        warn(reason)


def _list(cases: list[DrawnCase], plan: RandomPlan) -> None:
    from tilewright.cost import size
    from tilewright.workbench.bench.drawn import moved_bytes

    if plan.as_json:
        for one in cases:
            point = dict(one.case.point)
            print(json.dumps({"op": one.op.name, "case": point, "dtype": one.case.dtype, "layout": one.layout}))
        return
    shown = table("operation", "case", "dtype", "layout", right=("size",))
    for one in cases:
        shown.add_row(one.op.name, str(one.case), one.case.dtype, one.layout, size(moved_bytes(one.op, one.case)))
    console().print(shown)
    print(f"{len(cases)} cases; on a GPU they take about {_minutes(len(cases), plan)}")


def _minutes(cases: int, plan: RandomPlan) -> str:
    minutes = max(1, round(cases * len(plan.directions) * SECONDS_PER_CASE / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"


def _time(ops: list[Op], cases: list[DrawnCase], plan: RandomPlan, path: Path | None, fresh: bool) -> None:
    from tilewright import hardware

    context: dict[str, Any] = {"run": uuid.uuid4().hex, "seed": plan.seed}
    context |= {"device": hardware.current_gpu(), "versions": hardware.versions()}
    if not plan.as_json:
        print(f"{len(cases)} cases of seed {plan.seed}, about {_minutes(len(cases), plan)}")
    found: list[dict[str, Any]] = []
    was_interrupted = False
    try:
        for timing, extra in _timings(cases, plan, fresh, context["device"]):
            content = {k: v for k, v in timing.as_json().items() if k not in ("op", "kernel")}
            source_hash = source.kernel_hash(timing.op, timing.kernel) or ""
            content |= {"layout": timing.layout, "seconds": timing.seconds, **extra, **context}
            found.append(stamp("random", timing.op, timing.kernel, source_hash, **content))
            if path:
                append(path, found[-1:])
            if plan.as_json:
                print(json.dumps(found[-1]), flush=True)
    except KeyboardInterrupt:
        was_interrupted = True
        warn(f"interrupted; {len(found)} timings were completed")
    if not plan.as_json:
        _show(found, False)
        say_next(f"{len(found)} records are in {path}" if path else "add --record FILE.jsonl to keep the result")
    if was_interrupted:
        raise typer.Exit(130)


def _timings(
    cases: list[DrawnCase], plan: RandomPlan, fresh: bool, device: dict[str, Any]
) -> Iterator[tuple[Timing, dict[str, Any]]]:
    """Yield each timing, and further fields of its record, until the time is up."""
    from tilewright.timer import Timer
    from tilewright.workbench import bench as tool
    from tilewright.workbench.bench.ahead import CompilerPool, Job
    from tilewright.workbench.bench.runner import physical_seconds

    kernels = {id(one.op): _kernels(one.op) for one in cases}
    directions = {id(one.op): [d for d in plan.directions if d == "forward" or one.op.backward_cost] for one in cases}
    failures: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        compilers = stack.enter_context(CompilerPool())
        for one in cases:
            named = [kernel.name for kernel in kernels[id(one.op)] if kernel.name != "eager"]
            compilers.add(Job.of(one, named, directions[id(one.op)], device["gpu"], plan.captured))
        timer = Timer()
        ceilings = measure_ceilings(timer, fresh).rates  # while the compilers begin
        physical = physical_seconds(ceilings, device)
        deadline = time.monotonic() + 60 * plan.minutes if plan.minutes else float("inf")
        advance = stack.enter_context(progress("timing", len(cases)))
        for number, one in enumerate(cases):
            if time.monotonic() > deadline:
                warn(f"the time limit of {plan.minutes:g} minutes is over; {len(cases) - number} cases were not timed")
                break
            advance(f"{one.op.name} {one}")
            begin = time.monotonic()
            compiled = compilers.wait(number)
            waited = {"wait for compilers": round(time.monotonic() - begin, 3)}
            failures.update(f"{kernel} of {one.op.name} ({reason})" for kernel, reason in compiled.failures.items())
            extra = {"path": compiled.path, "aligned": one.is_aligned, "ceilings": ceilings}
            wanted = directions[id(one.op)]
            for timing in tool.bench(
                one.op,
                kernels[id(one.op)],
                clock=timer,
                cases=[one.check_case],
                directions=wanted,
                samples=plan.samples,
                physical=physical,
                effort=tool.QUICK,
                captured=plan.captured,
            ):
                timing.seconds |= waited if timing.direction == wanted[0] else {}
                yield timing, extra
    if failures:
        (what, times), *others = failures.most_common()
        more = f"; {len(others)} more like it" if others else ""
        warn(f"not compiled ahead, in {times} cases: {what}{more}")


def _kernels(op: Op) -> list[Kernel]:
    """Return eager, compile, the public function and, if the op is no variant, the installed peers."""
    from tilewright import registry

    is_variant = op is not registry.load(op.name)
    peers = [] if is_variant else [p for p in registry.peers(op).values() if not registry.absent(p)]
    return [*registry.pick(op, ["eager", "compile"]), *registry.shipped(op).values(), *peers]


def _show(records: list[dict[str, Any]], as_json: bool) -> None:
    from tilewright.report.drawn import ALL, WORST, line, notes, row, summaries

    found = summaries(records)
    if as_json:
        for summary in found:
            print(json.dumps(summary.as_json() | {"recorded": True}))
        return
    several = [(summary.gpu, summary.captured) for summary in found if summary.op == ALL]
    for group in several:
        shown = table("operation", right=("cases", "lost", "lost much", "worst", "geometric mean"))
        for summary in found:
            if (summary.gpu, summary.captured) == group and summary.op != ALL:
                shown.add_row(*line(summary))
        console().print(shown)
    for summary in found:
        if (summary.gpu, summary.captured) in several and summary.op != ALL:
            continue
        left, right = (
            ("operation", "case", "direction", "ours", "best baseline"),
            ("ours (us)", "best (us)", "ours / best"),
        )
        shown = table(*left, right=right, title=f"{summary.title}: the worst cases")
        for one in summary.results[:WORST]:
            shown.add_row(*row(one))
        console().print(shown)
        print(summary.sentence())
        for note in notes(summary):
            print(note)
