"""Any callable timed from a notebook or a script, alone or against others that do the same."""

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
from tilewright.errors import first_line
from tilewright.spec import Cost
from tilewright.timer import Lane, floor_us, require_working_gpu, timer_for, turns
from tilewright.workbench.bench import intervals
from tilewright.workbench.bench.runner import BACK_TO_BACK, SAMPLES, SHORT_US, physical_seconds
from tilewright.workbench.bench.state import watched
from tilewright.workbench.check.budget import Expected, Mismatch, compare, expect
from tilewright.worker.execute import KernelFailed, Like, Request, Stage, failures, flat, forward
from tilewright.worker.memory import Placed
from tilewright.worker.timed_run import Inputs, Lap, Track

FEWEST = 5  # samples: of less there is nothing to say
ALIGNED = 256  # elements: where a tensor begins in its memory is kept up to a multiple of so many
MODES: dict[str, Callable[[list[float]], Any]] = {"min": min, "max": max, "mean": mean, "median": median, "all": list}
NO_BASELINE = "nothing says what is right: name a callable that does the same, as against=reference"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """One callable. It has a time if it is right, or where nobody can say."""

    name: str
    verdict: str  # right, wrong, crashed, unsupported, implausible, not checked
    reason: str = ""
    us: float | None = None  # the median
    interval_us: Interval | None = None  # 95 % of it
    samples_us: tuple[float, ...] = ()
    host_us: float | None = None
    extra_bytes: int | None = None  # of memory at the peak, beyond arguments and results
    calls: int = 1  # in a sample, back to back
    is_queued: bool = True  # no sample has host time in it
    ratio: float | None = None  # the baseline's time over this one's
    ratio_interval: Interval | None = None
    is_tie: bool = False  # its interval and the baseline's overlap


@dataclass(frozen=True, repr=False)
class Benchmark:
    """`fn`, then those it was held against. Shows itself as a table."""

    entries: list[Entry]
    baseline: str | None
    clock: str
    floor_us: float  # what the clock says of nothing at all
    throttled: tuple[str, ...] = ()  # why the GPU held itself back

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
        said: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.reason:
                said.setdefault(f"{entry.verdict}, {entry.reason}", []).append(entry.name)
        yield from (f"{', '.join(names)}: {why}" for why, names in said.items())
        yield f"{self.clock}; of nothing at all it says {_figure(self.floor_us)} us, which is not subtracted"
        if calls := [entry.calls for entry in self.entries if entry.calls > 1]:
            yield f"* {calls[0]} calls back to back in a sample, each on arguments of its own"
        if late := [entry.name for entry in self.entries if not entry.is_queued]:
            yield f"host time is in samples of {', '.join(late)}: a call waits for the GPU on its way"
        if self.throttled:
            yield f"the GPU held itself back: {', '.join(self.throttled)}"


def benchmark(
    fn: Callable[..., Any],
    *args: Any,
    against: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    samples: int = SAMPLES,
    cost: Cost | None = None,
    inputs: Callable[[], tuple[Any, ...]] | None = None,
) -> Benchmark:
    """Time `fn`, and hold it against another callable, or several by name, that do the same with the same arguments.

    The first of `against` says what is right: one that is further from it than the error budget has no time. All are
    asked with the values given and with these in reverse order. Where that makes no sense give, instead of arguments,
    `inputs`: a function that makes a tuple of them, each time with other values in the same tensors. Calls work on
    copies, without gradients. With a `cost`, a time that the datasheet of this GPU rules out is not believed.
    """
    several = against if isinstance(against, Mapping) else {} if against is None else {_name(against): against}
    rivals = {str(name): rival for name, rival in several.items()}
    mine = _name(fn)
    while mine in rivals:
        mine += " (fn)"
    runners = {mine: fn, **rivals}
    for name, runner in runners.items():
        if not callable(runner):
            raise TypeError(f"{name} cannot be called: fn is a function, against another or a dict of them by name")
    if samples < FEWEST:
        raise ValueError(f"samples is at least {FEWEST}, not {samples}")
    if bool(args) == bool(inputs):
        raise TypeError("give the tensors fn works on, as benchmark(fn, x), or inputs=, a function that makes them")
    sets = [inputs(), inputs()] if inputs else [args, args]
    device = _device(sets)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        requests = [_request(sets[0]), _request(sets[1], in_reverse=not inputs)]
        return _timed(runners, next(iter(rivals), None), requests, device.type, samples, cost)


def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    grad_to_none: Sequence[Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """As `triton.testing.do_bench`, in milliseconds, by our timer: at least `warmup` ms and until two groups of samples
    agree, then samples for `rep` ms. Without a GPU, by the host's clock."""
    if return_mode not in MODES:
        raise ValueError(f"return_mode is one of {', '.join(MODES)}, not {return_mode!r}")

    def prepare() -> list[Callable[[], Any]]:
        for tensor in grad_to_none or ():
            tensor.grad = None
        return [fn]

    lane = Lane(timer_for("cuda" if torch.cuda.is_available() else "cpu"), prepare)
    end = time.perf_counter() + warmup / 1e3
    lane.warm_up()
    while time.perf_counter() < end:
        lane.sample()
    taken = []
    end = time.perf_counter() + rep / 1e3
    while len(taken) < FEWEST or time.perf_counter() < end:
        taken.append(lane.sample())
    if not all(sample.is_queued for sample in taken):
        warnings.warn("host time is in these samples: fn waits for the GPU on its way", stacklevel=2)
    times = [sample.us / 1e3 for sample in taken]
    if quantiles is None:
        return MODES[return_mode](times)
    found = np.quantile(times, quantiles).tolist()
    return found[0] if len(found) == 1 else found


class _Proof:
    """What the baseline makes of each request: the tensors it returns, and after them the arguments it writes to."""

    def __init__(self, baseline: Callable[..., Any], requests: Sequence[Request], device: str):
        """Raises KernelFailed where the baseline cannot say what is right."""
        self._requests, self._device = requests, device
        self._expected: list[list[Expected]] = []
        used = [a.copy(device) if isinstance(a, Placed) else a for a in requests[0].args]
        with failures():
            forward(baseline, _tensors(used), [])
        self._written = [n for n, a in _placed(requests[0]) if a.difference(used[n].memory, may_change=False)]
        whole = self.whole(baseline)
        with failures():
            _, returned = forward(whole, _copies(_tensors(requests[0].args)), [])
        odd = [_kind(r) for r in flat(returned) if not isinstance(r, Tensor) or r.is_complex()]
        if odd or not flat(returned):
            raise KernelFailed("not checked", f"returns {odd[0] if odd else 'nothing'}: only real tensors are compared")
        for request in requests:
            try:
                expected = expect(lambda *args: whole(*_copies(args)), _tensors(request.args))
            except Exception as error:
                what = "take the values in reverse, make others with inputs=" if self._expected else "run in float64"
                raise KernelFailed("not checked", f"does not {what} ({first_line(error)})") from None
            self._expected.append(expected)
            request.wanted = [Like(tuple(e.truth.shape), e.dtype) for e in expected]
            request.is_single = isinstance(returned, Tensor)

    def whole(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, which also returns what it writes to."""
        if not self._written:
            return fn
        return lambda *args: [*(r for r in flat(fn(*args)) if r is not None), *(args[n] for n in self._written)]

    def check(self, fn: Callable[..., Any]) -> None:
        stage, whole = Stage(self._device), self.whole(fn)
        for number, request in enumerate(self._requests):
            reply = stage.perform(whole, request)
            self.require(reply.outputs, number)
            for (n, before), after in zip(_placed(request), reply.memory, strict=True):
                if what := before.difference(after, may_change=n in self._written):
                    raise KernelFailed("wrong", f"its argument {n + 1} {what}")

    def require(self, results: Sequence[Tensor | None], number: int, before: str = "") -> None:
        expected = self._expected[number]
        before += "with other values, " if number else ""
        if len(results) != len(expected):
            raise KernelFailed("wrong", f"{before}returned {len(results)} tensors, expected {len(expected)}")
        for result, wanted in zip(results, expected, strict=True):
            match = compare(result, wanted) if result is not None else Mismatch(f"{wanted.what} is None")
            if isinstance(match, Mismatch):
                raise KernelFailed("wrong", before + match.reason)


@dataclass
class _Runner:
    """A callable on its way to an Entry. What it raises is kept, and nothing more is asked of it."""

    name: str
    track: Track
    laps: list[Lap] = field(default_factory=list)
    failure: KernelFailed | None = None

    def attempt(self, do: Callable[..., Any], *args: Any) -> Any:
        if self.failure:
            return None
        try:
            return do(*args)
        except KernelFailed as failure:
            self.failure = failure
            return require_working_gpu(self.name)

    def lap(self, proof: _Proof | None, values: int | None) -> None:
        self.laps.append(self.track.sample(values))
        if proof and values is not None:
            with failures():
                proof.require(self.track.results(), values, "right when it was checked, ")

    def entry(self, verdict: str, reason: str, least_us: float, aside: tuple[float, int | None], calls: int) -> Entry:
        if self.failure:
            kind = "unsupported" if self.failure.kind == "memory" else self.failure.kind
            return Entry(self.name, kind, str(self.failure))
        us = tuple(lap.us for lap in self.laps)
        middle, is_queued = median(us), all(lap.is_queued for lap in self.laps)
        if middle < least_us:
            reason = f"{middle:.1f} us, and the hardware needs {least_us:.1f} us by its datasheet"
            return Entry(self.name, "implausible", reason, samples_us=us, calls=calls, is_queued=is_queued)
        return Entry(self.name, verdict, reason, middle, intervals.of_median(us), us, *aside, calls, is_queued)


def _timed(
    fns: Mapping[str, Callable[..., Any]],
    baseline: str | None,
    requests: Sequence[Request],
    device: str,
    samples: int,
    cost: Cost | None,
) -> Benchmark:
    proof, verdict = None, ("not checked", NO_BASELINE)
    if baseline:
        try:
            proof, verdict = _Proof(fns[baseline], requests, device), ("right", "")
        except KernelFailed as failure:
            verdict = "not checked", f"{baseline} cannot say what is right: {failure}"
            require_working_gpu(baseline)
    clock, inputs = timer_for(device), Inputs(requests if proof else requests[:1], device, moves=proof is not None)
    floor = floor_us(clock)
    runners = {
        name: _Runner(name, Track(proof.whole(fn) if proof else fn, inputs, "forward", clock))
        for name, fn in fns.items()
    }
    for name, runner in runners.items():
        if proof:
            runner.attempt(proof.check, fns[name])
    pilots = [runner.attempt(runner.track.warm_up) for runner in runners.values()]
    asides = [runner.attempt(runner.track.aside) for runner in runners.values()]
    calls = BACK_TO_BACK if device == "cuda" and any(us is not None and us < SHORT_US for us in pilots) else 1
    for runner in runners.values() if calls > 1 else ():
        runner.attempt(runner.track.warm_up, calls)
    secret = random.SystemRandom()
    moments = {name: secret.sample(range(samples), len(requests)) if proof else [] for name in runners}
    with watched() as state:
        for name in turns(runners, samples):
            number, runner = len(runners[name].laps), runners[name]
            runner.attempt(runner.lap, proof, moments[name].index(number) if number in moments[name] else None)
    least = _least_us(cost) if cost and device == "cuda" else 0.0
    entries = [r.entry(*verdict, least, aside, calls) for r, aside in zip(runners.values(), asides, strict=True)]
    held = next((entry for entry in entries if entry.name == baseline), None)
    on_gpu = device == "cuda"
    said = f"{torch.cuda.get_device_name()}, cold L2, full queue" if on_gpu else "host clock, CPU, without oneDNN"
    throttled = state.get("throttled", ()) if on_gpu else ()
    return Benchmark([_against(entry, held) for entry in entries], baseline, said, floor, tuple(throttled))


def _against(entry: Entry, baseline: Entry | None) -> Entry:
    if not baseline or entry is baseline or not entry.interval_us or not baseline.interval_us:
        return entry
    ratio, *interval = intervals.of_ratio(baseline.samples_us, entry.samples_us, paired=True)
    lows, highs = zip(entry.interval_us, baseline.interval_us, strict=True)
    return replace(entry, ratio=ratio, ratio_interval=(interval[0], interval[1]), is_tie=max(lows) <= min(highs))


def _least_us(cost: Cost) -> float:
    """That the hardware needs by its datasheet; nothing where there is none."""
    device = hardware.in_hand()
    return physical_seconds({}, device)(cost) * 1e6 if device["gpu"] in hardware.DATASHEETS else 0.0


def _device(sets: Sequence[Sequence[Any]]) -> torch.device:
    if any(isinstance(args, Tensor) for args in sets):
        raise TypeError("inputs makes a tuple of arguments, as (x,)")
    tensors = [[a for a in args if isinstance(a, Tensor)] for args in sets]
    devices = sorted({str(t.device) for t in chain(*tensors)})
    if not devices:
        raise TypeError("none of the arguments is a tensor: give those that fn works on, as benchmark(fn, x)")
    if len(devices) > 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ValueError(f"the arguments are on {' and '.join(devices)}: move all to one GPU or to the CPU")
    if len({tuple((t.shape, t.stride(), t.storage_offset(), t.dtype) for t in of_one) for of_one in tensors}) > 1:
        raise ValueError("inputs makes tensors of other shapes, strides or dtypes each time: only values may change")
    return torch.device(devices[0])


def _request(args: Sequence[Any], *, in_reverse: bool = False) -> Request:
    return Request([_laid(a, in_reverse) if isinstance(a, Tensor) else a for a in args], wanted=[])


def _laid(tensor: Tensor, in_reverse: bool) -> Placed:
    """A copy that lies in memory as the tensor does, and begins as far from where memory is aligned."""
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset() % ALIGNED
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    held = tensor.detach().as_strided((offset + span,), (1,), tensor.storage_offset() - offset)
    if in_reverse and tensor.is_floating_point():  # whatever the strides, an element takes the place of another
        held = torch.cat([held[:offset], held[offset:].flip(0)])
    return replace(Placed.of(held, "contiguous"), shape=shape, stride=stride, offset=offset)


def _placed(request: Request) -> list[tuple[int, Placed]]:
    return [(number, a) for number, a in enumerate(request.args) if isinstance(a, Placed)]


def _tensors(args: Sequence[Any]) -> list[Any]:
    return [a.tensor() if isinstance(a, Placed) else a for a in args]


def _copies(args: Sequence[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def _kind(result: Any) -> str:
    return "complex numbers" if isinstance(result, Tensor) else type(result).__name__


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _figure(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def _span(interval: Interval) -> str:
    return f"{_figure(interval[0])} to {_figure(interval[1])}"
