"""Kernels of one Op against each other and the clock, case by case."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright import hardware
from tilewright.errors import first_line
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.timer import Clock, floor_us, require_working_gpu, turns
from tilewright.workbench.bench import intervals
from tilewright.workbench.bench.gpu_state import watched
from tilewright.workbench.check import FORWARD_ONLY, UserKernel, Verdict, check
from tilewright.workbench.check.budget import Mismatch, compare
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceFailed, ReferenceRun, ReferenceRuns
from tilewright.workbench.check.judge import FALLS_BACK, InProcess, Judge
from tilewright.worker.execute import KernelFailed, Request, kernel_failures
from tilewright.worker.memory import free_memory
from tilewright.worker.parent import Worker
from tilewright.worker.timed_run import InputPool, TimedRun, TimedSample

SAMPLES = 50
VALUES = (4, 5)  # sets that the check has not asked; one sample of each is looked at, at a moment nobody knows
SHORT_US = 10.0  # below this a sample holds several calls
BACK_TO_BACK = 16
PAUSE = 0.5  # seconds, before a throttled case is measured again
UNMEASURABLE = 1.25  # times the measured ceiling: where there is no datasheet, beyond this nothing is believed


@dataclass
class Timing:
    op: str
    kernel: str
    case: dict[str, Any]
    dtype: str
    direction: str
    cost: Cost
    verdict: str
    reason: str = ""
    is_baseline: bool = False
    calls: int = 1  # in a sample, back to back
    samples_us: list[float] = field(default_factory=list)
    median_us: float | None = None
    interval_us: list[float] | None = None  # 95 % of the median
    against: dict[str, Any] | None = None  # another kernel's time over this one's, with its interval
    is_torchs: bool = False  # torch's own operators do its work
    host_us: float | None = None
    extra_bytes: int | None = None
    state: dict[str, Any] = field(default_factory=dict)  # of the GPU
    timer: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Runner(Protocol):
    """What is timed: a TimedRun here, or a Worker that holds one."""

    def warm_up(self, calls: int = 1) -> float: ...
    def sample(self, values: int | None = None) -> TimedSample: ...
    def results(self) -> list[Tensor | None]: ...
    def overhead(self) -> tuple[float, int | None]: ...


@dataclass
class Entrant:
    kernel: Kernel | UserKernel
    verdict: Verdict
    worker: Worker | None = None  # of a user's file


def steps(kernels: Sequence[Kernel], files: Sequence[Path], cases: Sequence[Case], directions: Sequence[str]) -> int:
    """How many times `on_step` will be called at most."""
    once = sum(not kernel.builds_per_case for kernel in kernels) + len(files)
    return once + len(cases) * (1 + len(directions))


def bench(
    op: Op,
    kernels: Sequence[Kernel],
    files: Sequence[Path] = (),
    *,
    clock: Clock,
    cases: Sequence[Case],
    directions: Sequence[str] = ("forward",),
    samples: int = SAMPLES,
    device: str = "cuda",
    against: str = "eager",
    physical: Callable[[Cost], float] = lambda _: 0.0,
    proven: Collection[str] = (),
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Timing]:
    """Timings of all kernels, case by case. `physical` says the least seconds a Cost can take, `proven` names kernels
    that a check has found right already, and `on_step` is told what is being done."""
    floor = floor_us(clock)
    with contextlib.ExitStack() as stack:
        entrants = [*_own(op, kernels, proven, cases, directions, device, on_step)]
        for path in files:
            entrants.append(_user(op, path, cases, device, stack, on_step))
        for case in cases:
            contest = Contest(op, case, entrants, clock, samples, device, against, physical, floor)
            yield from contest.run(directions, on_step)
            del contest
            if device == "cuda":
                torch.cuda.empty_cache()  # workers need memory too


def physical_seconds(measured: Mapping[str, float], device: Mapping[str, Any]) -> Callable[[Cost], float]:
    """The least time a Cost can take on a GPU, by its datasheet. What is written may stay in the L2, and arithmetic may
    be done by a faster unit, so only what must be read, and products of matrices, count."""
    sheet = hardware.DATASHEETS.get(device["gpu"])
    rates = sheet.rates() if sheet else {unit: UNMEASURABLE * rate for unit, rate in measured.items()}

    def least(cost: Cost) -> float:
        bytes_moved = cost.read + max(0, cost.written - device["l2"])
        products = {unit: amount for unit, amount in cost.flops.items() if unit.startswith("tensor.")}
        work = {"read": bytes_moved, **products}
        return max((amount / rates[unit] for unit, amount in work.items() if unit in rates), default=0.0)

    return least


def _own(
    op: Op,
    kernels: Sequence[Kernel],
    proven: Collection[str],
    cases: Sequence[Case],
    directions: Sequence[str],
    device: str,
    on_step: Callable[[str], None],
) -> Iterator[Entrant]:
    """Those that are compiled for each case are checked on the timed ones alone: each is another program. Gradients are
    asked for if they are timed."""
    if [*directions] == ["forward"]:
        kernels = [replace(kernel, differentiable=False) for kernel in kernels]
    checked = [kernel for kernel in kernels if not kernel.builds_per_case and kernel.name not in proven]
    verdicts = check(op, checked, device=device, dtypes=sorted({case.dtype for case in cases}), depth="quick")
    for kernel in kernels:
        verdict = Verdict(op.name, kernel.name, "right")
        if kernel in checked:
            on_step(f"checking {kernel.name}")
            verdict = next(verdicts)
            require_working_gpu(kernel.name)
        yield Entrant(kernel, verdict)


def _user(
    op: Op,
    path: Path,
    cases: Sequence[Case],
    device: str,
    stack: contextlib.ExitStack,
    on_step: Callable[[str], None],
) -> Entrant:
    on_step(f"checking {path.name}")
    verdict = next(iter(check(op, files=[path], device=device, dtypes=sorted({case.dtype for case in cases}))))
    has_gradient = op.backward_cost is not None and FORWARD_ONLY not in verdict.labels
    worker = stack.enter_context(Worker(device=device))
    if verdict.verdict == "right":
        try:
            worker.load(op.name, file=path)
        except KernelFailed as failure:
            verdict = Verdict(op.name, path.name, "crashed", f"while loading the file again: {failure}")
    kernel = UserKernel(path.name, has_gradient)
    return Entrant(kernel, verdict, worker)


def cost_of(op: Op, case: Case, direction: str) -> Cost:
    """Of nothing where the Op has no gradient, or its gradient is the incoming one itself."""
    args = op.make(case, "meta")
    if direction == "forward":
        return op.cost(*args)
    back = op.backward_cost(*args) if op.backward_cost else Cost(0, 0)
    return back if direction == "backward" or not back.bytes else op.cost(*args) + back


class Contest:
    """All entrants on one case."""

    def __init__(
        self,
        op: Op,
        case: Case,
        entrants: Sequence[Entrant],
        clock: Clock,
        samples: int,
        device: str,
        against: str,
        physical: Callable[[Cost], float],
        floor: float,
    ):
        self._op, self._case, self._entrants, self._clock = op, case, entrants, clock
        self._samples, self._device, self._against = samples, device, against
        self._physical, self._floor = physical, floor
        self._trial = CheckCase(case)
        self._references = ReferenceRuns(op, device, secrets.randbits(32), evicts_large=False, is_training=True)

    def run(self, directions: Sequence[str], on_step: Callable[[str], None]) -> Iterator[Timing]:
        torch._dynamo.reset()  # else the ninth shape would silently run uncompiled
        wanted = [d for d in directions if cost_of(self._op, self._case, d).bytes]
        with_gradients = wanted != ["forward"]
        on_step(f"checking {self._case}")
        try:
            answers = [self._references(self._trial, with_gradients, number) for number in VALUES]
        except (torch.cuda.OutOfMemoryError, ReferenceFailed) as error:
            reason = _too_large(self._op, self._case) if not isinstance(error, ReferenceFailed) else first_line(error)
            for direction in wanted:
                yield from (self._without_time(e, direction, "unsupported", reason) for e in self._entrants)
            return
        verdicts: dict[str, Verdict] = {}
        for direction in wanted:
            told: set[str] = set()
            try:
                verdicts = verdicts or {e.kernel.name: self._verdict(e, with_gradients) for e in self._entrants}
                on_step(f"timing {self._case} {direction}")
                for timing in self._direction(direction, answers, verdicts):
                    told.add(timing.kernel)
                    yield timing
            except torch.cuda.OutOfMemoryError:  # while results were compared
                reason = _too_large(self._op, self._case)
                rest = [entrant for entrant in self._entrants if entrant.kernel.name not in told]
                yield from (self._without_time(e, direction, "unsupported", reason) for e in rest)

    def _verdict(self, entrant: Entrant, with_gradients: bool) -> Verdict:
        """On the very inputs to be timed."""
        if entrant.verdict.verdict != "right":
            return entrant.verdict
        kernel = entrant.kernel
        if not with_gradients:
            kernel = replace(kernel, differentiable=False)
        host = entrant.worker or InProcess(kernel.fn, self._device)  # type: ignore[union-attr]
        judge = Judge(self._op, kernel, host, self._references, self._device)
        verdict = judge.judge([self._trial], lambda: None)
        if not entrant.worker:
            require_working_gpu(f"{kernel.name} on {self._case}")
        return verdict

    def _without_time(self, entrant: Entrant, direction: str, verdict: str, reason: str) -> Timing:
        kernel, case = entrant.kernel, self._case
        point, cost = dict(case.point), cost_of(self._op, case, direction)
        return Timing(
            self._op.name, kernel.name, point, case.dtype, direction, cost, verdict, reason, kernel.is_baseline
        )

    def _direction(
        self, direction: str, answers: Sequence[ReferenceRun], verdicts: Mapping[str, Verdict]
    ) -> Iterator[Timing]:
        try:
            requests = [self._request(answer, direction) for answer in answers]
            inputs = InputPool(requests, self._device)
        except torch.cuda.OutOfMemoryError:
            reason = _too_large(self._op, self._case)
            yield from (self._without_time(e, direction, "unsupported", reason) for e in self._entrants)
            return
        running: dict[str, Runner] = {}
        by_name = {entrant.kernel.name: entrant for entrant in self._entrants}
        overheads: dict[str, tuple[float, int | None]] = {}
        pilots: dict[str, float] = {}
        for name, entrant in by_name.items():
            verdict = verdicts[name]
            if verdict.verdict != "right":
                yield self._without_time(entrant, direction, verdict.verdict, verdict.reason)
            elif direction != "forward" and not entrant.kernel.differentiable:
                yield self._without_time(entrant, direction, "unsupported", "has no gradient")
            else:
                try:
                    running[name] = self._begin(entrant, requests, inputs, direction)
                    pilots[name] = running[name].warm_up()
                    overheads[name] = running[name].overhead()
                except KernelFailed as failure:
                    running.pop(name, None)
                    yield self._failed(entrant, direction, failure)
        is_short = bool(running) and min(pilots[name] for name in running) < SHORT_US
        calls = BACK_TO_BACK if is_short and self._device != "cpu" else 1
        for name in [*running] if calls > 1 else ():
            try:
                running[name].warm_up(calls)
            except KernelFailed as failure:
                del running[name]
                yield self._failed(by_name[name], direction, failure)
        measured = self._measure(running, calls, direction, answers)
        for name, failure in measured.failed.items():
            yield self._failed(by_name[name], direction, failure)
        reference = measured.us.get(self._against, [])
        if reference and self._implausible(cost_of(self._op, self._case, direction), reference):
            reference = []
        for name in running:
            us = measured.us.get(name)
            if us is None:
                continue
            timing = self._without_time(by_name[name], direction, "right", "")
            timing.is_torchs = FALLS_BACK in verdicts[name].labels
            timing.calls, timing.samples_us = calls, [round(sample, 3) for sample in us]
            timing.state, timing.timer = measured.state, {"floor_us": round(self._floor, 3), **measured.timer[name]}
            timing.host_us, timing.extra_bytes = round(overheads[name][0], 2), overheads[name][1]
            if reason := self._implausible(timing.cost, us):
                timing.verdict, timing.reason = "implausible", reason
            else:
                timing.median_us = round(median(us), 3)
                timing.interval_us = [round(edge, 3) for edge in intervals.of_median(us)]
                if reference:
                    ratio, low, high = intervals.of_ratio(reference, us, paired=True)
                    edges = [round(low, 4), round(high, 4)]
                    timing.against = {"kernel": self._against, "ratio": round(ratio, 4), "interval": edges}
            yield timing
        for entrant in self._entrants:
            if entrant.worker:
                with contextlib.suppress(KernelFailed):  # it has said all there is to say
                    entrant.worker.end()

    def _request(self, answer: ReferenceRun, direction: str) -> Request:
        request = self._references.request(self._trial, answer)
        return request if direction != "forward" else replace(request, grads=[], needs_grad=[])

    def _begin(self, entrant: Entrant, requests: Sequence[Request], inputs: InputPool, direction: str) -> Runner:
        if entrant.worker:
            entrant.worker.begin(requests, direction)
            return entrant.worker
        assert isinstance(entrant.kernel, Kernel)
        return TimedRun(entrant.kernel.fn, inputs, direction, self._clock)

    def _failed(self, entrant: Entrant, direction: str, failure: KernelFailed) -> Timing:
        if not entrant.worker:
            require_working_gpu(f"{entrant.kernel.name} on {self._case}")
        kind = {"memory": "unsupported", "usage": "crashed"}.get(failure.kind, failure.kind)
        return self._without_time(entrant, direction, kind, f"while it was timed: {failure}")

    def _implausible(self, cost: Cost, us: Sequence[float]) -> str:
        least = self._physical(cost) * 1e6
        if median(us) >= least:
            return ""
        return f"{median(us):.1f} us, and the hardware needs {least:.1f} us by its datasheet"

    def _measure(
        self, running: dict[str, Runner], calls: int, direction: str, answers: Sequence[ReferenceRun]
    ) -> _Measured:
        """Again, once, if the GPU held itself back or a time cannot be true."""
        cost = cost_of(self._op, self._case, direction)
        found = self._rounds(running, calls, direction, answers)
        if found.state.get("throttled") or any(self._implausible(cost, us) for us in found.us.values()):
            time.sleep(PAUSE)
            again = self._rounds({n: r for n, r in running.items() if n not in found.failed}, calls, direction, answers)
            again.failed |= found.failed
            again.state["again"] = True
            return again
        return found

    def _rounds(
        self, running: Mapping[str, Runner], calls: int, direction: str, answers: Sequence[ReferenceRun]
    ) -> _Measured:
        found = _Measured()
        secret = random.SystemRandom()
        moments = {n: secret.sample(range(self._samples), len(VALUES)) for n in running}
        with watched() as found.state:
            for name in turns(running, self._samples):
                if name in found.failed:
                    continue
                taken = found.us.setdefault(name, [])
                begin = time.perf_counter()
                try:
                    values = moments[name].index(len(taken)) if len(taken) in moments[name] else None
                    lap = running[name].sample(values)
                    found.spent.setdefault(name, []).append(time.perf_counter() - begin - calls * lap.us * 1e-6)
                    if values is not None:
                        with kernel_failures():
                            self._require_right(running[name].results(), direction, answers[values])
                except KernelFailed as failure:
                    found.failed[name] = failure
                    del found.us[name]
                    continue
                taken.append(lap.us)
                found.unqueued[name] = found.unqueued.get(name, 0) + (not lap.is_queued)
        return found

    def _require_right(self, results: Sequence[Tensor | None], direction: str, answer: ReferenceRun) -> None:
        expected = answer.expected
        if direction != "both":
            expected = [e for e in expected if e.is_gradient == (direction == "backward")]
        if len(results) != len(expected):
            raise KernelFailed("wrong", f"returned {len(results)} tensors, expected {len(expected)}")
        for result, wanted in zip(results, expected, strict=True):
            if result is None and not wanted.truth.any():
                continue
            match = compare(result, wanted) if result is not None else Mismatch(f"{wanted.name} is None")
            if isinstance(match, Mismatch):
                raise KernelFailed("wrong", f"right when it was checked, {match.reason}")


@dataclass
class _Measured:
    us: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, KernelFailed] = field(default_factory=dict)
    spent: dict[str, list[float]] = field(default_factory=dict)  # seconds of each sample beside what it times
    unqueued: dict[str, int] = field(default_factory=dict)  # samples with host time in them
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def timer(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "overhead_us": round(median(self.spent[name]) * 1e6, 1),
                "unqueued": self.unqueued[name],
            }
            for name in self.us
        }


def _too_large(op: Op, case: Case) -> str:
    size = sum(a.nbytes for a in op.make(case, device="meta") if isinstance(a, torch.Tensor))
    with_copies = f"inputs of {size / 2**30:.1f} GiB, with copies and their float64 truth,"
    return f"{with_copies} do not fit in {free_memory()[1]}"
