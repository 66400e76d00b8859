"""Find the size from which on a public function's own kernel is faster than torch, in eager mode and captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from tilewright.errors import first_line
from tilewright.runtime.crossovers import CAPTURED, Crossover, save
from tilewright.spec import Case, Kernel, Op
from tilewright.timer import Clock, require_working_gpu
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceFailed, ReferenceRuns
from tilewright.workbench.check.judge import InProcess, Judge
from tilewright.worker.execute import KernelFailed, Request
from tilewright.worker.timed_run import InputPool, TimedRun

ENOUGH = 3  # sizes in a row at which our kernel wins both ways; larger ones are not measured
LARGEST = 2**28  # bytes moved: at larger sizes neither the launch nor the host matters
TIE = 1.02  # ours / torch: a longer time is a loss, a shorter one may be noise
WARM_UP = 0.05  # seconds per kernel, at most


@dataclass(frozen=True)
class Times:
    """The time of a call in microseconds."""

    device_us: float
    host_us: float

    @property
    def eager_us(self) -> float:
        """Return the time per call of many calls in a row: the slower of host and device."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True)
class Comparison:
    """Our kernel and torch at one size, in the unit of the crossover."""

    size: int
    case: Case
    ours: Times
    torch: Times


@dataclass
class CrossoverSearch:
    op: str
    unit: str
    comparisons: list[Comparison] = field(default_factory=list)
    reason: str = ""  # why it stopped early

    @property
    def eager(self) -> float:
        return _first_win(self.comparisons, lambda times: times.eager_us)

    @property
    def captured(self) -> float:
        return _first_win(self.comparisons, lambda times: times.device_us)

    def save(self, gpu: str) -> None:
        """Write both sizes for a GPU, unless nothing was compared."""
        if self.comparisons:
            save(gpu, {self.op: self.eager, self.op + CAPTURED: self.captured})

    def as_json(self, gpu: str) -> dict[str, Any]:
        measured = [
            {"size": one.size, "case": dict(one.case.point)}
            | {f"ours_{name}": getattr(one.ours, name) for name in ("device_us", "host_us")}
            | {f"torch_{name}": getattr(one.torch, name) for name in ("device_us", "host_us")}
            for one in self.comparisons
        ]
        sizes = {name: None if n == math.inf else n for name, n in (("eager", self.eager), ("captured", self.captured))}
        return {"op": self.op, "gpu": gpu, "unit": self.unit, **sizes, "measured": measured, "reason": self.reason}


def _first_win(comparisons: Sequence[Comparison], time: Callable[[Times], float]) -> float:
    """Return the smallest size from which on our kernel is as fast, up to noise; 0 if it is at all sizes."""
    found = math.inf
    for one in sorted(comparisons, key=lambda one: one.size, reverse=True):
        if time(one.ours) > TIE * time(one.torch):
            return found
        found = one.size
    return 0 if comparisons else math.inf


def find_crossover(
    op: Op,
    crossover: Crossover,
    *,
    clock: Clock,
    device: str = "cuda",
    samples: int,
    on_step: Callable[[str], None] = lambda _: None,
) -> CrossoverSearch:
    """Time the public function with and without our kernel on growing sizes, each checked first."""
    assert op.shipped, "only a public function has a crossover"
    found = CrossoverSearch(op.name, crossover.unit)
    kernel = replace(op.shipped, differentiable=False)
    for case in op.sizes():
        if op.cost(*op.make(case, "meta")).bytes > LARGEST:
            break
        on_step(f"{op.name} {case}")
        try:
            ours, torch_times = _compare(op, kernel, case, crossover, clock, device, samples)
        except (KernelFailed, ReferenceFailed, torch.cuda.OutOfMemoryError) as failure:
            found.reason = f"{case}: {first_line(failure)}"
            return found
        size = crossover.size(*op.make(case, "meta"))
        found.comparisons.append(Comparison(size, case, ours, torch_times))
        last = found.comparisons[-ENOUGH:]
        wins = [one.ours.eager_us <= one.torch.eager_us and one.ours.device_us <= one.torch.device_us for one in last]
        if len(wins) == ENOUGH and all(wins):
            return found
    return found


def _compare(
    op: Op, kernel: Kernel, case: Case, crossover: Crossover, clock: Clock, device: str, samples: int
) -> Iterator[Times]:
    """Yield the times of our kernel, which is checked first, and of torch on one case, or raise KernelFailed."""
    references, check_case = ReferenceRuns(op, device, seed=0, is_training=True), CheckCase(case)
    request: Request = replace(references.request(check_case, references(check_case, False, 0)), needs_grad=[])
    inputs = InputPool([request], device)
    for size in (0, math.inf):
        with crossover.override(size):
            if size == 0:
                judge = Judge(op, kernel, InProcess(kernel.fn, device), references, device)
                verdict = judge.judge([check_case], lambda: None)
                if device == "cuda":
                    require_working_gpu(f"{kernel.name} on {case}")
                if verdict.verdict != "right":
                    raise KernelFailed(verdict.verdict, verdict.reason)
            run = TimedRun(kernel.fn, inputs, "forward", clock)
            run.warm_up(limit=WARM_UP)
            yield Times(median(run.sample().us for _ in range(samples)), run.overhead()[0])
