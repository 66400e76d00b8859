"""The command `tilewright bench --random`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright import source
from tilewright.cli.shared import console, measure_ceilings, newest_records, progress, say_next, table, warn
from tilewright.record import append, stamp

if TYPE_CHECKING:
    from tilewright.report.drawn import Summary
    from tilewright.spec import Kernel, Op
    from tilewright.timer import Timer
    from tilewright.workbench.bench import Timing
    from tilewright.workbench.bench.drawn import DrawnCase

SECONDS_PER_CASE = 12  # mostly torch.compile, for each case and direction


@dataclass(frozen=True)
class RandomPlan:
    """The cases to draw, and how to time them."""

    count: int
    seed: int
    directions: tuple[str, ...]
    samples: int
    minutes: float | None  # after which no further case is begun
    lists: bool  # list the cases, time nothing
    as_json: bool


def bench_random(op: Op, plan: RandomPlan, record: Path | None, fresh: bool) -> None:
    """Draw cases and time them; without a GPU, show recorded results or list the cases."""
    from tilewright import hardware
    from tilewright.workbench.bench.drawn import draw

    has_gpu = hardware.has_gpu()
    if has_gpu and not plan.lists:
        from tilewright.worker.memory import free_memory

        _time(op, draw(op, plan.count, plan.seed, memory=free_memory()[0]), plan, record, fresh)
        return
    if record:
        warn(f"nothing is timed, so nothing is written to {record}")
    with newest_records() as found:
        recorded = [r for r in found if r["kind"] == "random" and r["op"] == op.name and r["seed"] == plan.seed]
    if recorded and not plan.lists:
        _show(recorded, plan.as_json)
    else:
        _list(op, draw(op, plan.count, plan.seed), plan)
        if not has_gpu and not plan.as_json:
            say_next(f"timing needs a GPU: tilewright bench {op.name} --random {plan.count} --seed {plan.seed}")


def _list(op: Op, cases: list[DrawnCase], plan: RandomPlan) -> None:
    from tilewright.cost import size
    from tilewright.workbench.bench.drawn import moved_bytes

    if plan.as_json:
        for one in cases:
            point = dict(one.case.point)
            print(json.dumps({"op": op.name, "case": point, "dtype": one.case.dtype, "layout": one.layout}))
        return
    shown = table("case", "dtype", "layout", right=("size",))
    for one in cases:
        shown.add_row(str(one.case), one.case.dtype, one.layout, size(moved_bytes(one.op, one.case)))
    console().print(shown)
    print(f"{len(cases)} cases; on a GPU they take about {_minutes(len(cases), plan)} minutes")


def _minutes(cases: int, plan: RandomPlan) -> str:
    return f"{max(1, round(cases * len(plan.directions) * SECONDS_PER_CASE / 60))}"


def _time(op: Op, cases: list[DrawnCase], plan: RandomPlan, path: Path | None, fresh: bool) -> None:
    from tilewright import hardware
    from tilewright.timer import Timer

    timer = Timer()
    ceilings = measure_ceilings(timer, fresh)
    context: dict[str, Any] = {"run": uuid.uuid4().hex, "seed": plan.seed, "ceilings": ceilings.rates}
    context |= {"device": hardware.current_gpu(), "versions": hardware.versions()}
    if not plan.as_json:
        print(f"{len(cases)} cases of seed {plan.seed}, about {_minutes(len(cases), plan)} minutes")
    found: list[dict[str, Any]] = []
    was_interrupted = False
    try:
        for timing in _timings(op, cases, plan, timer, context):
            content = {k: v for k, v in timing.as_json().items() if k not in ("op", "kernel")}
            source_hash = source.kernel_hash(op.name, timing.kernel) or ""
            content |= {"layout": timing.layout, **context}
            found.append(stamp("random", op.name, timing.kernel, source_hash, **content))
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


class _TimeIsUp(Exception):
    pass


def _timings(
    op: Op, cases: list[DrawnCase], plan: RandomPlan, timer: Timer, context: dict[str, Any]
) -> Iterator[Timing]:
    """Yield the timings of all cases until the time is up; those of the Op itself first, then its variants'."""
    from tilewright.workbench import bench as tool
    from tilewright.workbench.bench.runner import physical_seconds

    deadline = time.monotonic() + 60 * plan.minutes if plan.minutes else float("inf")
    physical = physical_seconds(context["ceilings"], context["device"])
    with progress(f"timing {op.name}", None) as advance:

        def step(text: str) -> None:
            if time.monotonic() > deadline:
                raise _TimeIsUp
            advance(text)

        for chosen in (op, *op.variants):
            drawn = [one.check_case for one in cases if one.op is chosen]
            directions = [d for d in plan.directions if d == "forward" or chosen.backward_cost]
            kernels = _kernels(chosen, with_peers=chosen is op)
            try:
                yield from tool.bench(
                    chosen,
                    kernels if drawn else [],
                    clock=timer,
                    cases=drawn,
                    directions=directions,
                    samples=plan.samples,
                    physical=physical,
                    on_step=step,
                )
            except _TimeIsUp:
                warn(f"the time limit of {plan.minutes:g} minutes is over; the other cases were not timed")
                return


def _kernels(op: Op, *, with_peers: bool) -> list[Kernel]:
    """Return eager, compile, the public function and the installed peers."""
    from tilewright import registry

    peers = [p for p in registry.peers(op).values() if with_peers and not registry.absent(p)]
    return [*registry.pick(op, ["eager", "compile"]), *registry.shipped(op).values(), *peers]


def _show(records: list[dict[str, Any]], as_json: bool) -> None:
    from tilewright.report.drawn import WORST, row, summaries

    for summary in summaries(records):
        if as_json:
            print(json.dumps(_as_json(summary)))
            continue
        right = ("ours (us)", "best (us)", "ours / best")
        shown = table("case", "direction", "best baseline", right=right, title=f"{summary.op} on {summary.device}")
        for one in summary.results[:WORST]:
            case, direction, ours, kernel, best, ratio = row(one)
            shown.add_row(case, direction, kernel, ours, best, ratio)
        console().print(shown)
        print(summary.sentence())
        if summary.untimed:
            print(f"{summary.untimed} cases were not timed: too large, or a kernel was not correct")
        if summary.stale:
            print(f"{summary.stale} results are stale: the source changed after the measurement")


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "op": summary.op,
        "gpu": summary.gpu,
        "seeds": summary.seeds,
        "cases": len(summary.results),
        "lost": summary.lost,
        "geometric_mean": summary.geometric_mean if summary.results else None,
        "untimed": summary.untimed,
        "recorded": True,
    }
