"""Time any callable from a notebook or a script, alone or against others that compute the same."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright import hardware
from tilewright.captured import portable
from tilewright.errors import first_line
from tilewright.spec import FAR_BELOW, Cost
from tilewright.timer import Sampler, floor_us, require_working_gpu, shuffled_rounds, timer_for
from tilewright.variants import is_sorted, vary
from tilewright.workbench.bench import intervals
from tilewright.workbench.bench.case_runner import BACK_TO_BACK, SHORT_US
from tilewright.workbench.bench.gpu_state import record_gpu_state
from tilewright.workbench.bench.runner import SAMPLES, physical_seconds
from tilewright.workbench.check.budget import ExpectedTensor, Mismatch, compare, expect, shows_nothing
from tilewright.workbench.check.repeatable import unrepeatable
from tilewright.worker.execute import (
    Executor,
    KernelFailed,
    OutputSpec,
    Request,
    flatten,
    forward,
    kernel_failures,
    uncomparable,
)
from tilewright.worker.memory import GuardedTensor, same_bits
from tilewright.worker.results import result_names
from tilewright.worker.tampering import FunctionSnapshot
from tilewright.worker.timed_run import InputPool, TimedRun, TimedSample

MIN_SAMPLES = 5
IN_REVERSE = "in reverse"
OTHER_VALUES = ("random signs", FAR_BELOW)  # for arguments of at most MAX_VARIED elements
MAX_VARIED = 2**24
THESE_ONLY = "right on these values only"
ALWAYS_THE_SAME = "the values never change, so that a constant would be right, too: pass inputs= to draw others"
ALIGNMENT = 256  # elements: copies keep a tensor's offset from a multiple of this
MODES: dict[str, Callable[[list[float]], Any]] = {"min": min, "max": max, "mean": mean, "median": median, "all": list}
NO_BASELINE = "there is nothing to compare it with: pass a callable that computes the same as against=reference"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """One callable. It has a time if it is right or not checked."""

    name: str
    verdict: str  # right, THESE_ONLY, wrong, crashed, tampered, unsupported, implausible, not checked
    reason: str = ""
    us: float | None = None  # the median
    interval_us: Interval | None = None  # 95 % confidence interval of the median
    samples_us: tuple[float, ...] = ()
    host_us: float | None = None
    extra_bytes: int | None = None  # peak memory beyond arguments and outputs
    calls: int = 1  # per sample, back to back
    is_queued: bool = True  # no sample contains host time
    ratio: float | None = None  # the baseline's time over this one's
    ratio_interval: Interval | None = None
    is_tie: bool = False  # the intervals of this and the baseline overlap


@dataclass(frozen=True, repr=False)
class Benchmark:
    """The entry of `fn`, then those of `against`. Prints as a table."""

    entries: list[Entry]
    baseline: str | None
    clock: str
    floor_us: float  # the time of an empty call
    throttled: tuple[str, ...] = ()  # why the GPU lowered its clocks

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = [[escape(cell) for cell in row] for row in self._rows()]
        body = "".join(f"<tr><td>{'<td>'.join(row)}" for row in rows)
        notes = "<br>".join(map(escape, self._notes()))
        return f"<table><thead><tr><th>{'<th>'.join(head)}<tbody>{body}</table><p>{notes}</p>"

    def _rows(self) -> list[list[str]]:
        against = [f"vs {self.baseline}"] if self.baseline else []
        head = ["kernel", "time", "95 %", "host", "extra memory", *against, "verdict"]
        return [head, *([e.name, *self._figures(e)[: len(head) - 2], e.verdict] for e in self.entries)]

    def _figures(self, entry: Entry) -> list[str]:
        if entry.us is None or entry.interval_us is None or entry.host_us is None:
            return ["-", "", "", "", ""]
        extra = "" if entry.extra_bytes is None else f"{entry.extra_bytes / 2**20:,.1f} MiB"
        speed = "baseline" if entry.name == self.baseline else ""
        if entry.ratio and entry.ratio_interval:
            speed = f"{entry.ratio:.2f}x ({_span(entry.ratio_interval)})" + ", tie" * entry.is_tie
        mark = "*" if entry.calls > 1 else ""
        return [f"{_figure(entry.us)} us{mark}", _span(entry.interval_us), f"{_figure(entry.host_us)} us", extra, speed]

    def _notes(self) -> Iterator[str]:
        names_of: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.reason:
                names_of.setdefault(f"{entry.verdict}, {entry.reason}", []).append(entry.name)
        yield from (f"{', '.join(names)}: {reason}" for reason, names in names_of.items())
        yield f"{self.clock}; an empty call takes {_figure(self.floor_us)} us, which is not subtracted"
        if calls := [entry.calls for entry in self.entries if entry.calls > 1]:
            yield f"* {calls[0]} calls back to back per sample, each on its own arguments"
        if late := [entry.name for entry in self.entries if not entry.is_queued]:
            yield f"samples of {', '.join(late)} include host time: the call synchronizes with the GPU"
        if self.throttled:
            yield f"the GPU was throttled: {', '.join(self.throttled)}"


def benchmark(
    fn: Callable[..., Any],
    *args: Any,
    against: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    samples: int = SAMPLES,
    cost: Cost | None = None,
    inputs: Callable[[], tuple[Any, ...]] | None = None,
) -> Benchmark:
    """Time `fn`, alone or against a callable, or a dict of callables, that compute the same from the same arguments.

    The first of `against` is the reference: a callable whose outputs exceed the error budget has no time. A reference
    that does not repeat itself is refused, and nothing is checked. All are called with the given values and with the
    values in reverse order, those of integers only if there are no others. Small arguments are also tried with other
    signs and far below zero, if the reference takes them; what fails there alone is "right on these values only". If
    that makes no sense, pass `inputs` instead of arguments: a function that returns a tuple of them, with other values
    in tensors of the same shapes each time. Calls work on copies, without gradients. With a `cost`, a time below the
    minimum of the GPU's datasheet is reported as implausible.
    """
    several = against if isinstance(against, Mapping) else {} if against is None else {_name(against): against}
    others = {str(name): other for name, other in several.items()}
    own_name = _name(fn)
    while own_name in others:
        own_name += " (fn)"
    callables = {own_name: fn, **others}
    for name, one in callables.items():
        if not callable(one):
            raise TypeError(f"{name} is not callable: fn must be a function, and against a function or a dict of them")
    if samples < MIN_SAMPLES:
        raise ValueError(f"samples must be at least {MIN_SAMPLES}, not {samples}")
    if bool(args) == bool(inputs):
        raise TypeError("pass either arguments, as benchmark(fn, x), or inputs=, a function that returns them")
    sets = [inputs(), inputs()] if inputs else [args, args]
    device = _device(sets)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        requests = [_request(sets[0]), _request(sets[1], values="" if inputs else IN_REVERSE)]
        small = sum(a.numel() for a in args if isinstance(a, Tensor)) <= MAX_VARIED
        varied = [(kind, _request(args, values=kind)) for kind in OTHER_VALUES if args and small]
        return _timed(callables, next(iter(others), None), requests, varied, device.type, samples, cost)


def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    grad_to_none: Sequence[Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """Time `fn` in milliseconds, as `triton.testing.do_bench` does, with our timer.

    Warm up for at least `warmup` ms and until two groups of samples agree, then sample for `rep` ms. Without a GPU, use
    the host's clock.
    """
    if return_mode not in MODES:
        raise ValueError(f"return_mode must be one of {', '.join(MODES)}, not {return_mode!r}")

    def prepare() -> list[Callable[[], Any]]:
        for tensor in grad_to_none or ():
            tensor.grad = None
        return [fn]

    sampler = Sampler(timer_for("cuda" if torch.cuda.is_available() else "cpu"), prepare)
    end = time.perf_counter() + warmup / 1e3
    sampler.warm_up()
    while time.perf_counter() < end:
        sampler.sample()
    taken = []
    end = time.perf_counter() + rep / 1e3
    while len(taken) < MIN_SAMPLES or time.perf_counter() < end:
        taken.append(sampler.sample())
    if not all(sample.is_queued for sample in taken):
        warnings.warn("the samples include host time: fn synchronizes with the GPU", stacklevel=2)
    times = [sample.us / 1e3 for sample in taken]
    if quantiles is None:
        return MODES[return_mode](times)
    found = np.quantile(times, quantiles).tolist()
    return found[0] if len(found) == 1 else found


class _Reference:
    """The baseline's outputs for each request, followed by the arguments that it writes to."""

    def __init__(
        self,
        baseline: Callable[..., Any],
        requests: Sequence[Request],
        varied: Sequence[tuple[str, Request]],
        device: str,
    ):
        """Raises KernelFailed if the baseline cannot serve as a reference."""
        self._requests, self._device = requests, device
        self._expected: list[list[ExpectedTensor]] = []
        used = [a.copy(device) if isinstance(a, GuardedTensor) else a for a in requests[0].args]
        with kernel_failures():
            forward(baseline, _tensors(used), [])
        self._written = [n for n, a in _guarded(requests[0]) if a.difference(used[n].memory, may_change=False)]
        complete = self.with_written_arguments(portable(baseline))
        with kernel_failures():
            _, returned = forward(complete, _copies(_tensors(requests[0].args)), [])
        if reason := uncomparable(returned):
            raise KernelFailed("not checked", reason)
        with kernel_failures():
            reason = unrepeatable(complete, _tensors(requests[0].args))
        if reason:
            raise KernelFailed("not checked", reason)
        for request in requests:
            try:
                expected = expect(lambda *args: complete(*_copies(args)), _tensors(request.args))
            except Exception as error:
                what = "accept the values in reverse, pass others with inputs=" if self._expected else "run in float64"
                raise KernelFailed("not checked", f"does not {what} ({first_line(error)})") from None
            if not self._expected and (reason := shows_nothing(expected)):
                raise KernelFailed("not checked", reason)
            self._expected.append(expected)
            self._specify(request, expected, returned)
        self._varied: list[tuple[str, Request, list[ExpectedTensor]]] = []
        for kind, request in varied:
            with contextlib.suppress(Exception):  # a baseline may refuse other values
                expected = expect(lambda *args: complete(*_copies(args)), _tensors(request.args))
                if all(e.non_finite <= own.non_finite for e, own in zip(expected, self._expected[0], strict=True)):
                    self._specify(request, expected, returned)
                    self._varied.append((kind, request, expected))

    @staticmethod
    def _specify(request: Request, expected: Sequence[ExpectedTensor], returned: Any) -> None:
        request.output_specs = [OutputSpec(tuple(e.truth.shape), e.dtype) for e in expected]
        request.returns_tensor, request.names = isinstance(returned, Tensor), result_names(returned)

    def with_written_arguments(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` with the arguments it writes to as further outputs."""
        if not self._written:
            return fn
        return lambda *args: [*(r for r in flatten(fn(*args)) if r is not None), *(args[n] for n in self._written)]

    def check(self, fn: Callable[..., Any]) -> None:
        executor, complete = Executor(self._device), self.with_written_arguments(fn)
        for number, request in enumerate(self._requests):
            reply = executor.execute(complete, request)
            self.require(reply.outputs, self._expected[number], "with other values, " if number else "")
            for (n, before), after in zip(_guarded(request), reply.memory, strict=True):
                if what := before.difference(after, may_change=n in self._written):
                    raise KernelFailed("wrong", f"its argument {n + 1} {what}")

    def why_not_other_values(self, fn: Callable[..., Any]) -> str:
        """Return why a callable is right on the given values only; empty if it is not."""
        first, *others = self._requests[0], self._requests[1], *(request for _, request, _ in self._varied)
        if all(_same_values(first, other) for other in others):
            return ALWAYS_THE_SAME
        executor, complete = Executor(self._device), self.with_written_arguments(fn)
        for kind, request, expected in self._varied:
            try:
                self.require(executor.execute(complete, request).outputs, expected, f"{kind}: ")
            except KernelFailed as failure:
                return str(failure)
        return ""

    def require_sample(self, results: Sequence[Tensor | None], number: int) -> None:
        """Raise if the outputs of a timed call for a request are wrong."""
        where = "with other values, " if number else ""
        self.require(results, self._expected[number], f"right when it was checked, {where}")

    @staticmethod
    def require(results: Sequence[Tensor | None], expected: Sequence[ExpectedTensor], before: str) -> None:
        if len(results) != len(expected):
            raise KernelFailed("wrong", f"{before}returned {len(results)} tensors, expected {len(expected)}")
        for result, wanted in zip(results, expected, strict=True):
            match = compare(result, wanted) if result is not None else Mismatch(f"{wanted.name} is None")
            if isinstance(match, Mismatch):
                raise KernelFailed("wrong", before + match.reason)


@dataclass
class _Candidate:
    """A callable that is being timed. After a failure it is not called again."""

    name: str
    run: TimedRun
    before: FunctionSnapshot
    caveat: str = ""  # why it is right on the given values only
    samples: list[TimedSample] = field(default_factory=list)
    failure: KernelFailed | None = None

    def attempt(self, do: Callable[..., Any], *args: Any) -> Any:
        if self.failure:
            return None
        try:
            result = do(*args)
            if replaced := self.before.replaced():
                raise KernelFailed("tampered", f"{', '.join(replaced[:4])} was replaced")
            return result
        except KernelFailed as failure:
            self.failure = failure
            return require_working_gpu(self.name)

    def sample(self, reference: _Reference | None, values: int | None) -> None:
        self.samples.append(self.run.sample(values))
        if reference and values is not None:
            with kernel_failures():
                reference.require_sample(self.run.results(), values)

    def entry(
        self, verdict: str, reason: str, least_us: float, overhead: tuple[float, int | None], calls: int
    ) -> Entry:
        if self.failure:
            kind = "unsupported" if self.failure.kind in ("memory", "declined") else self.failure.kind
            return Entry(self.name, kind, str(self.failure))
        us = tuple(sample.us for sample in self.samples)
        middle, is_queued = median(us), all(sample.is_queued for sample in self.samples)
        if middle < least_us:
            reason = f"{middle:.1f} us, but the hardware needs at least {least_us:.1f} us by its datasheet"
            return Entry(self.name, "implausible", reason, samples_us=us, calls=calls, is_queued=is_queued)
        if self.caveat:
            verdict, reason = THESE_ONLY, self.caveat
        return Entry(self.name, verdict, reason, middle, intervals.of_median(us), us, *overhead, calls, is_queued)


def _timed(
    fns: Mapping[str, Callable[..., Any]],
    baseline: str | None,
    requests: Sequence[Request],
    varied: Sequence[tuple[str, Request]],
    device: str,
    samples: int,
    cost: Cost | None,
) -> Benchmark:
    reference, verdict = None, ("not checked", NO_BASELINE)
    if baseline:
        try:
            reference, verdict = _Reference(fns[baseline], requests, varied, device), ("right", "")
        except KernelFailed as failure:
            verdict = "not checked", f"{baseline} cannot be the reference: {failure}"
            require_working_gpu(baseline)
    clock = timer_for(device)
    inputs = InputPool(requests if reference else requests[:1], device, rotates=reference is not None)
    floor = floor_us(clock)
    candidates: dict[str, _Candidate] = {}
    before = FunctionSnapshot()
    for name, fn in fns.items():
        complete = reference.with_written_arguments(fn) if reference else fn
        candidates[name] = _Candidate(name, TimedRun(complete, inputs, "forward", clock), before)
        if reference:
            candidates[name].attempt(reference.check, fn)
            candidates[name].caveat = candidates[name].attempt(reference.why_not_other_values, fn) or ""
    pilots = [candidate.attempt(candidate.run.warm_up) for candidate in candidates.values()]
    overheads = [candidate.attempt(candidate.run.overhead) for candidate in candidates.values()]
    calls = BACK_TO_BACK if device == "cuda" and any(us is not None and us < SHORT_US for us in pilots) else 1
    for candidate in candidates.values() if calls > 1 else ():
        candidate.attempt(candidate.run.warm_up, calls)
    secret = random.SystemRandom()
    checked = {name: secret.sample(range(samples), len(requests)) if reference else [] for name in candidates}
    with record_gpu_state() as state:
        for name in shuffled_rounds(candidates, samples):
            number, candidate = len(candidates[name].samples), candidates[name]
            values = checked[name].index(number) if number in checked[name] else None
            candidate.attempt(candidate.sample, reference, values)
    least = _least_us(cost) if cost and device == "cuda" else 0.0
    pairs = zip(candidates.values(), overheads, strict=True)
    entries = [candidate.entry(*verdict, least, overhead, calls) for candidate, overhead in pairs]
    base = next((entry for entry in entries if entry.name == baseline), None)
    on_gpu = device == "cuda"
    clock_name = f"{torch.cuda.get_device_name()}, cold L2, full queue" if on_gpu else "host clock, CPU, without oneDNN"
    throttled = state.get("throttled", ()) if on_gpu else ()
    return Benchmark([_against(entry, base) for entry in entries], baseline, clock_name, floor, tuple(throttled))


def _against(entry: Entry, baseline: Entry | None) -> Entry:
    if not baseline or entry is baseline or not entry.interval_us or not baseline.interval_us:
        return entry
    ratio, *interval = intervals.of_ratio(baseline.samples_us, entry.samples_us, paired=True)
    lows, highs = zip(entry.interval_us, baseline.interval_us, strict=True)
    return replace(entry, ratio=ratio, ratio_interval=(interval[0], interval[1]), is_tie=max(lows) <= min(highs))


def _least_us(cost: Cost) -> float:
    """Return the minimum time by the GPU's datasheet; 0 without one."""
    device = hardware.current_gpu()
    return physical_seconds({}, device)(cost) * 1e6 if device["gpu"] in hardware.DATASHEETS else 0.0


def _device(sets: Sequence[Sequence[Any]]) -> torch.device:
    if any(isinstance(args, Tensor) for args in sets):
        raise TypeError("inputs must return a tuple of arguments, as (x,)")
    tensors = [[a for a in args if isinstance(a, Tensor)] for args in sets]
    devices = sorted({str(t.device) for t in chain(*tensors)})
    if not devices:
        raise TypeError("none of the arguments is a tensor: pass the tensors that fn works on, as benchmark(fn, x)")
    if len(devices) > 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ValueError(f"the arguments are on {' and '.join(devices)}: move all to one GPU or to the CPU")
    if len({tuple((t.shape, t.stride(), t.storage_offset(), t.dtype) for t in group) for group in tensors}) > 1:
        raise ValueError("inputs returns tensors of other shapes, strides or dtypes each time: only values may change")
    return torch.device(devices[0])


def _request(args: Sequence[Any], *, values: str = "") -> Request:
    tensors = [a for a in args if isinstance(a, Tensor)]
    reverses_all = not any(t.is_floating_point() and t.numel() for t in tensors)
    copies = [_guarded_copy(a, values, reverses_all) if isinstance(a, Tensor) else a for a in args]
    return Request(copies, output_specs=[])


def _same_values(one: Request, other: Request) -> bool:
    pairs = zip(_guarded(one), _guarded(other), strict=True)
    return all(same_bits(a.tensor(), b.tensor()) for (_, a), (_, b) in pairs)


def _guarded_copy(tensor: Tensor, values: str, reverses_all: bool) -> GuardedTensor:
    """Return a copy with the tensor's strides and alignment, and its values or others made of them."""
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset() % ALIGNMENT
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    memory = tensor.detach().as_strided((offset + span,), (1,), tensor.storage_offset() - offset)
    is_reversed = tensor.is_floating_point() or (reverses_all and not is_sorted(tensor))
    if values == IN_REVERSE and is_reversed:  # this permutes the elements, whatever the strides
        memory = torch.cat([memory[:offset], memory[offset:].flip(0)])
    elif values in OTHER_VALUES and vary([tensor], values, tensor.device.type, 0)[0] is not tensor:
        (memory,) = vary([memory], values, tensor.device.type, 0)
    return replace(GuardedTensor.copy_of(memory, "contiguous"), shape=shape, stride=stride, offset=offset)


def _guarded(request: Request) -> list[tuple[int, GuardedTensor]]:
    return [(number, a) for number, a in enumerate(request.args) if isinstance(a, GuardedTensor)]


def _tensors(args: Sequence[Any]) -> list[Any]:
    return [a.tensor() if isinstance(a, GuardedTensor) else a for a in args]


def _copies(args: Sequence[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _figure(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def _span(interval: Interval) -> str:
    return f"{_figure(interval[0])} to {_figure(interval[1])}"
