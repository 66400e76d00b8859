"""Time all candidates on one case, interleaved."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.errors import first_line
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.timer import MAX_WARM_UP, Clock, require_working_gpu, shuffled_rounds
from tilewright.workbench.bench import intervals
from tilewright.workbench.bench.gpu_state import record_gpu_state
from tilewright.workbench.check import UserKernel, Verdict
from tilewright.workbench.check.budget import ExpectedTensor, Mismatch, compare
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceFailed, ReferenceRun, ReferenceRuns
from tilewright.workbench.check.judge import FALLS_BACK, InProcess, Judge
from tilewright.worker.execute import KernelFailed, Request, kernel_failures
from tilewright.worker.memory import free_memory
from tilewright.worker.parent import Worker
from tilewright.worker.timed_run import GRAPH_CALLS, GraphRun, InputPool, TimedRun, TimedSample

VALUES = (4, 5)  # input sets that the check does not use; one random sample of each is checked
SHORT_US = 10.0  # for shorter calls a sample is several calls
BACK_TO_BACK = 16
PAUSE = 0.5  # seconds before a throttled case is measured again


@dataclass(frozen=True)
class Effort:
    """The checks and samples of a case."""

    is_checked: bool = True  # kernels are judged on the Op's own cases, baselines too
    values: tuple[int, ...] = VALUES
    warm_up: float = MAX_WARM_UP  # seconds per kernel, at most
    narrow: float | None = None  # sampling ends once all intervals are at most this wide, relative to their medians
    enough: int = 0  # samples before it may end
    seconds: float = float("inf")  # after which it ends too


THOROUGH = Effort()
# For cases that are many and not known before: each is proven on its own inputs.
QUICK = Effort(is_checked=False, values=VALUES[:1], warm_up=0.05, narrow=0.01, enough=8, seconds=0.3)


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
    calls: int = 1  # per sample, back to back
    samples_us: list[float] = field(default_factory=list)
    median_us: float | None = None
    interval_us: list[float] | None = None  # 95 % of the median
    against: dict[str, Any] | None = None  # time of another kernel / time of this one, with its interval
    runs_torch: bool = False  # falls back to torch's operators
    host_us: float | None = None
    extra_bytes: int | None = None
    state: dict[str, Any] = field(default_factory=dict)  # GPU clocks, power, temperature, throttling
    timer: dict[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"  # the inputs are laid out so
    seconds: dict[str, float] = field(default_factory=dict)  # that the case took, by phase
    captured: bool = False  # in a CUDA graph

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a `timing` record."""
        content = asdict(self)
        del content["seconds"]
        for name, default in (("layout", "contiguous"), ("captured", False)):
            if content[name] == default:
                del content[name]
        return content | {"is_torchs": content.pop("runs_torch")}


class TimedKernel(Protocol):
    """A kernel being timed: a TimedRun in this process, or a Worker with one."""

    def warm_up(self, calls: int = 1, *, limit: float = MAX_WARM_UP) -> float: ...
    def sample(self, values: int | None = None) -> TimedSample: ...
    def results(self) -> list[Tensor | None]: ...
    def overhead(self) -> tuple[float, int | None]: ...


@dataclass
class Candidate:
    kernel: Kernel | UserKernel
    verdict: Verdict
    worker: Worker | None = None  # for a user's file


def cost_of(op: Op, case: Case, direction: str) -> Cost:
    """Return the cost of a case; zero if unknown, without a gradient, or if that is the incoming one unchanged."""
    args = op.make(case, "meta")
    if direction == "forward":
        return op.cost(*args)
    back = op.backward_cost(*args) if op.backward_cost else Cost(0, 0)
    return back if direction == "backward" or not back.bytes else op.cost(*args) + back


class CaseRunner:
    """Time all candidates on one case."""

    def __init__(
        self,
        op: Op,
        case: CheckCase,
        candidates: Sequence[Candidate],
        clock: Clock,
        samples: int,
        device: str,
        against: str,
        physical: Callable[[Cost], float],
        floor: float,
        effort: Effort = THOROUGH,
        captured: bool = False,
    ):
        self._op, self._case, self._candidates, self._clock = op, case.case, candidates, clock
        self._samples, self._device, self._against = samples, device, against
        self._physical, self._floor = physical, floor
        self._check_case, self._effort, self._captured = case, effort, captured
        self._seconds: dict[str, float] = {}
        self._references = ReferenceRuns(op, device, secrets.randbits(32), evicts_large=False, is_training=True)

    def run(self, directions: Sequence[str], on_step: Callable[[str], None]) -> Iterator[Timing]:
        torch._dynamo.reset()  # the ninth shape would silently run uncompiled
        wanted = [d for d in directions if self._op.file or cost_of(self._op, self._case, d).bytes]
        with_gradients = wanted != ["forward"]
        on_step(f"checking {self._case}")
        try:
            with self._phase("references"):
                references = [self._references(self._check_case, with_gradients, n) for n in self._effort.values]
        except (torch.cuda.OutOfMemoryError, ReferenceFailed) as error:
            reason = _too_large(self._op, self._case) if not isinstance(error, ReferenceFailed) else first_line(error)
            for direction in wanted:
                yield from (self._untimed(e, direction, "unsupported", reason) for e in self._candidates)
            return
        verdicts: dict[str, Verdict] = {}
        for direction in wanted:
            reported: set[str] = set()
            try:
                with self._phase("checks"):
                    verdicts = verdicts or {e.kernel.name: self._verdict(e, with_gradients) for e in self._candidates}
                on_step(f"timing {self._case} {direction}")
                for timing in self._direction(direction, references, verdicts):
                    reported.add(timing.kernel)
                    timing.seconds = {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}
                    yield timing
                self._seconds.clear()
            except torch.cuda.OutOfMemoryError:  # when results are compared
                reason = _too_large(self._op, self._case)
                rest = [candidate for candidate in self._candidates if candidate.kernel.name not in reported]
                yield from (self._untimed(e, direction, "unsupported", reason) for e in rest)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Add the time until the context exits to a phase."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begin

    def _verdict(self, candidate: Candidate, with_gradients: bool) -> Verdict:
        """Check a candidate on the inputs to be timed."""
        if candidate.verdict.verdict != "right":
            return candidate.verdict
        if not self._effort.is_checked and candidate.kernel.origin == "baseline":
            return candidate.verdict  # one of its timed samples is checked
        kernel = candidate.kernel
        if not with_gradients:
            kernel = replace(kernel, differentiable=False)
        host = candidate.worker or InProcess(kernel.fn, self._device)  # type: ignore[union-attr]
        judge = Judge(self._op, kernel, host, self._references, self._device)
        verdict = judge.judge([self._check_case], lambda: None)
        if not candidate.worker:
            require_working_gpu(f"{kernel.name} on {self._case}")
        return verdict

    def _untimed(self, candidate: Candidate, direction: str, verdict: str, reason: str) -> Timing:
        kernel, case = candidate.kernel, self._case
        point, cost = dict(case.point), cost_of(self._op, case, direction)
        timing = Timing(
            self._op.name, kernel.name, point, case.dtype, direction, cost, verdict, reason, kernel.is_baseline
        )
        timing.layout, timing.captured = self._check_case.layout, self._captured
        return timing

    def _direction(
        self, direction: str, references: Sequence[ReferenceRun], verdicts: Mapping[str, Verdict]
    ) -> Iterator[Timing]:
        try:
            with self._phase("inputs"):
                requests = [self._request(reference, direction) for reference in references]
                inputs = InputPool(requests, self._device)
        except torch.cuda.OutOfMemoryError:
            reason = _too_large(self._op, self._case)
            yield from (self._untimed(e, direction, "unsupported", reason) for e in self._candidates)
            return
        running: dict[str, TimedKernel] = {}
        by_name = {candidate.kernel.name: candidate for candidate in self._candidates}
        overheads: dict[str, tuple[float, int | None]] = {}
        pilots: dict[str, float] = {}
        for name, candidate in by_name.items():
            verdict = verdicts[name]
            if verdict.verdict != "right":
                yield self._untimed(candidate, direction, verdict.verdict, verdict.reason)
            elif direction != "forward" and not candidate.kernel.differentiable:
                yield self._untimed(candidate, direction, "unsupported", "has no gradient")
            else:
                try:
                    with self._phase("compile" if candidate.kernel.builds_per_case else "warm-up"):
                        running[name] = self._begin(candidate, requests, inputs, direction)
                        pilots[name] = running[name].warm_up(limit=self._effort.warm_up)
                    with self._phase("host time"):
                        overheads[name] = running[name].overhead()
                except KernelFailed as failure:
                    running.pop(name, None)
                    yield self._failed(candidate, direction, failure)
        is_short = bool(running) and not self._captured and min(pilots[name] for name in running) < SHORT_US
        calls = BACK_TO_BACK if is_short and self._device != "cpu" else 1
        for name in [*running] if calls > 1 else ():
            try:
                with self._phase("warm-up"):
                    running[name].warm_up(calls, limit=self._effort.warm_up)
            except KernelFailed as failure:
                del running[name]
                yield self._failed(by_name[name], direction, failure)
        with self._phase("samples"):
            measured = self._measure(running, calls, direction, references)
        for name, failure in measured.failed.items():
            yield self._failed(by_name[name], direction, failure)
        baseline = measured.us.get(self._against, [])
        if baseline and self._implausible(cost_of(self._op, self._case, direction), baseline):
            baseline = []
        for name in running:
            us = measured.us.get(name)
            if us is None:
                continue
            timing = self._untimed(by_name[name], direction, "right", "")
            timing.runs_torch = FALLS_BACK in verdicts[name].labels
            timing.calls = GRAPH_CALLS if self._captured else calls
            timing.samples_us = [round(sample, 3) for sample in us]
            timing.state, timing.timer = measured.state, {"floor_us": round(self._floor, 3), **measured.timer[name]}
            timing.host_us, timing.extra_bytes = round(overheads[name][0], 2), overheads[name][1]
            if reason := self._implausible(timing.cost, us):
                timing.verdict, timing.reason = "implausible", reason
            else:
                timing.median_us = round(median(us), 3)
                timing.interval_us = [round(edge, 3) for edge in intervals.of_median(us)]
                if baseline:
                    ratio, low, high = intervals.of_ratio(baseline, us, paired=True)
                    edges = [round(low, 4), round(high, 4)]
                    timing.against = {"kernel": self._against, "ratio": round(ratio, 4), "interval": edges}
            yield timing
        for candidate in self._candidates:
            if candidate.worker:
                with contextlib.suppress(KernelFailed):  # already timed
                    candidate.worker.end()

    def _request(self, reference: ReferenceRun, direction: str) -> Request:
        request = self._references.request(self._check_case, reference)
        return request if direction != "forward" else replace(request, grads=[], needs_grad=[])

    def _begin(
        self, candidate: Candidate, requests: Sequence[Request], inputs: InputPool, direction: str
    ) -> TimedKernel:
        if self._captured and isinstance(candidate.kernel, Kernel):
            return GraphRun(candidate.kernel.fn, inputs, self._device, self._clock)
        if candidate.worker:
            candidate.worker.begin(requests, direction)
            return candidate.worker
        assert isinstance(candidate.kernel, Kernel)
        return TimedRun(candidate.kernel.fn, inputs, direction, self._clock)

    def _failed(self, candidate: Candidate, direction: str, failure: KernelFailed) -> Timing:
        if not candidate.worker:
            require_working_gpu(f"{candidate.kernel.name} on {self._case}")
        kind = {"memory": "unsupported", "declined": "unsupported", "usage": "crashed"}.get(failure.kind, failure.kind)
        return self._untimed(candidate, direction, kind, f"when timed: {failure}")

    def _implausible(self, cost: Cost, us: Sequence[float]) -> str:
        """Return why a time is implausible; an empty string if it is not."""
        min_us = self._physical(cost) * 1e6
        if median(us) >= min_us:
            return ""
        return f"measured {median(us):.1f} us, but the hardware needs {min_us:.1f} us by its datasheet"

    def _measure(
        self, running: dict[str, TimedKernel], calls: int, direction: str, references: Sequence[ReferenceRun]
    ) -> _Measured:
        """Sample all candidates; once more if the GPU was throttled or a time is implausible."""
        cost = cost_of(self._op, self._case, direction)
        found = self._rounds(running, calls, direction, references)
        if found.state.get("throttled") or any(self._implausible(cost, us) for us in found.us.values()):
            time.sleep(PAUSE)
            again = self._rounds(
                {n: r for n, r in running.items() if n not in found.failed}, calls, direction, references
            )
            again.failed |= found.failed
            again.state["again"] = True
            return again
        return found

    def _rounds(
        self, running: Mapping[str, TimedKernel], calls: int, direction: str, references: Sequence[ReferenceRun]
    ) -> _Measured:
        found = _Measured()
        # From the system: a kernel cannot predict which samples are checked.
        rng = random.SystemRandom()
        certain = min(self._samples, self._effort.enough or self._samples)
        checked = {n: rng.sample(range(certain), len(references)) for n in running}
        started = time.monotonic()
        with record_gpu_state() as found.state:
            for number, name in enumerate(shuffled_rounds(running, self._samples)):
                if number % len(running) == 0 and self._is_enough(found.us, number // len(running), started):
                    break
                if name in found.failed:
                    continue
                taken = found.us.setdefault(name, [])
                begin = time.perf_counter()
                try:
                    values = checked[name].index(len(taken)) if len(taken) in checked[name] else None
                    sample = running[name].sample(values)
                    found.overhead.setdefault(name, []).append(time.perf_counter() - begin - calls * sample.us * 1e-6)
                    if values is not None:
                        with kernel_failures():
                            self._require_right(running[name].results(), direction, references[values])
                except KernelFailed as failure:
                    found.failed[name] = failure
                    del found.us[name]
                    continue
                taken.append(sample.us)
                found.unqueued[name] = found.unqueued.get(name, 0) + (not sample.is_queued)
        return found

    def _is_enough(self, us: Mapping[str, Sequence[float]], rounds: int, begin: float) -> bool:
        """Return whether further rounds would hardly change the medians, or take too long."""
        narrow = self._effort.narrow
        if narrow is None or rounds < self._effort.enough:
            return False
        if time.monotonic() - begin > self._effort.seconds:
            return True
        return all(intervals.width_of_median(taken) <= narrow * median(taken) for taken in us.values())

    def _require_right(self, results: Sequence[Tensor | None], direction: str, reference: ReferenceRun) -> None:
        expected = reference.expected
        if direction != "both":
            expected = [e for e in expected if e.is_gradient == (direction == "backward")]
        if len(results) != len(expected):
            raise KernelFailed("wrong", f"returned {len(results)} tensors, expected {len(expected)}")
        for result, wanted in zip(results, expected, strict=True):
            if result is None and isinstance(wanted, ExpectedTensor) and not wanted.truth.any():
                continue
            match = compare(result, wanted) if result is not None else Mismatch(f"{wanted.name} is None")
            if isinstance(match, Mismatch):
                raise KernelFailed("wrong", f"right when checked, but {match.reason}")


@dataclass
class _Measured:
    us: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, KernelFailed] = field(default_factory=dict)
    overhead: dict[str, list[float]] = field(default_factory=dict)  # seconds per sample outside the timed region
    unqueued: dict[str, int] = field(default_factory=dict)  # samples that include host time
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def timer(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "overhead_us": round(median(self.overhead[name]) * 1e6, 1),
                "unqueued": self.unqueued[name],
            }
            for name in self.us
        }


def _too_large(op: Op, case: Case) -> str:
    size = sum(a.nbytes for a in op.make(case, device="meta") if isinstance(a, torch.Tensor))
    needed = f"inputs of {size / 2**30:.1f} GiB, their copies and the float64 reference"
    return f"{needed} do not fit into {free_memory()[1]}"
