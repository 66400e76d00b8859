"""Timers: the device time of a call, between two CUDA events, or its host time on a CPU.

Before each sample the L2 is flushed, and the GPU is kept busy until the host has queued all timed work, so that the
events measure the device alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.errors import GPUUnusable, first_line

FLUSH_FACTOR = 4  # bytes read to flush the L2, over its size
SLEEP_HZ = 2.0e9  # cycles per second of torch.cuda._sleep, roughly
MIN_HEAD_START = 50e-6  # seconds, longer than it takes to queue a flush
MAX_HEAD_START = 0.1  # seconds
ATTEMPTS = 6  # at queueing a sample in time, each with twice the head start
HOST_CALLS = 20
GROUP = 5  # samples per group; warm-up compares the medians of two groups
STEADY = 0.01  # relative difference between the medians of two groups
MAX_WARM_UP = 0.5  # seconds per kernel, at most

Call = Callable[[], Any]
Calls = Sequence[Call]
Keep = Callable[[list[Any]], Any]


def _nothing() -> None: ...


@dataclass
class Sample:
    us: float  # per call
    is_queued: bool = True  # all work was queued before the GPU started it, so no host time is included
    kept: Any = None  # what the `keep` function returned


class Clock(Protocol):
    """A source of samples: CUDA events, or the host's clock for tensors on the CPU."""

    def sample(self, calls: Calls, head_start: float, fill: Call = _nothing, keep: Keep | None = None) -> Sample:
        """Run the calls back to back and return the time per call.

        `fill` writes the inputs just before; `keep` selects what to keep of the results just after.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        ...

    def extra_bytes(self, call: Call) -> int | None:
        """Return the peak memory of a call beyond what it returns, or None if it cannot be measured."""
        ...


class Timer:
    """CUDA events on the current stream.

    `flush` ("read", "write" or "none") and `queues` exist to demonstrate what goes wrong with other settings.
    """

    def __init__(self, *, flush: str = "read", queues: bool = True) -> None:
        self._flush, self._queues = flush, queues
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cold = torch.randn(FLUSH_FACTOR * l2 // 4, device="cuda")
        self._sink = torch.empty((), device="cuda")
        self._driver = ctypes.CDLL("libcuda.so.1") if torch.version.cuda else None

    def sample(self, calls: Calls, head_start: float, fill: Call = _nothing, keep: Keep | None = None) -> Sample:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream()
        self.synchronize()
        if self._driver:
            self._driver.cuCtxResetPersistingL2Cache()  # persisting lines survive a flush
        if self._queues:
            torch.cuda._sleep(int(head_start * SLEEP_HZ))
        fill()  # queued behind the sleep, so that work on a stream that does not wait reads other inputs
        if self._flush == "read":  # dirty lines would be written back during the timed call
            torch.sum(self._cold, dim=0, out=self._sink)
        elif self._flush == "write":
            self._cold.zero_()
        start.record(stream)
        results = [call() for call in calls]
        end.record(stream)
        is_queued = not start.query()
        torch.cuda.set_stream(stream)  # a call may have switched streams
        kept = keep(results) if keep else None
        self.synchronize()  # work left on other streams must not run during the next sample
        return Sample(start.elapsed_time(end) * 1e3 / max(1, len(calls)), is_queued or not self._queues, kept)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def extra_bytes(self, call: Call) -> int | None:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        returned = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(call())}
        return max(0, torch.cuda.max_memory_allocated() - before - sum(returned.values()))

    def interleave(self, calls: Mapping[str, Call], samples: int) -> dict[str, list[float]]:
        """Return the microseconds of all samples of each call."""
        return interleave(self, calls, samples)


class HostTimer:
    """The host's clock, for tensors on the CPU."""

    def sample(self, calls: Calls, head_start: float, fill: Call = _nothing, keep: Keep | None = None) -> Sample:
        fill()
        begin = time.perf_counter()
        results = [call() for call in calls]
        spent = time.perf_counter() - begin
        return Sample(spent * 1e6 / max(1, len(calls)), True, keep(results) if keep else None)

    def synchronize(self) -> None: ...

    def extra_bytes(self, call: Call) -> int | None:
        return None


def timer_for(device: str) -> Clock:
    return Timer() if device == "cuda" else HostTimer()


def floor_us(clock: Clock) -> float:
    """Return the time that the clock measures for an empty sample."""
    return median(clock.sample([], MIN_HEAD_START).us for _ in range(50))


class Sampler:
    """Takes samples of one callable, with a head start long enough to queue them.

    `prepare` returns the calls of the next sample, `fill` writes their inputs.
    """

    def __init__(self, clock: Clock, prepare: Callable[[], Calls], fill: Call = _nothing):
        self._clock, self._prepare, self._fill = clock, prepare, fill
        self._head_start, self._attempts = MIN_HEAD_START, ATTEMPTS

    def sample(self, keep: Keep | None = None) -> Sample:
        head_start = self._head_start
        sample = self._clock.sample(self._prepare(), head_start, self._fill, keep)
        for _ in range(self._attempts):
            if sample.is_queued:
                break
            head_start = min(2 * head_start, MAX_HEAD_START)
            sample = self._clock.sample(self._prepare(), head_start, self._fill, keep)
        if sample.is_queued:
            self._head_start = head_start
        else:
            self._attempts = 0  # the call synchronizes with the GPU, so no head start helps
        return sample

    def warm_up(self, limit: float = MAX_WARM_UP) -> float:
        """Compile, then sample until the medians of two groups agree or for `limit` seconds; return the last median."""
        calls = self._ready()
        for call in calls:
            call()
        self._head_start = min(self._head_start + 1.5e-6 * self.host_us() * len(calls), MAX_HEAD_START)
        self._attempts = ATTEMPTS
        begin, last = time.monotonic(), float("inf")
        while True:
            now = median(self.sample().us for _ in range(GROUP))
            if abs(now - last) <= STEADY * now or time.monotonic() - begin > limit:
                return now
            last = now

    def host_us(self, *, back_to_back: bool = False) -> float:
        """Return the host time of one call, the minimum of several since other processes can only add to it.

        Nothing is queued before the call or, with `back_to_back`, the same call is: a host is slow for a while after it
        has waited for the GPU.
        """
        times = []
        with _gc_disabled():
            while len(times) < HOST_CALLS:
                for call in self._ready():
                    self._clock.synchronize()
                    if back_to_back:
                        call()
                        self._fill()
                    begin = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - begin)
        self._clock.synchronize()
        return min(times) * 1e6

    def extra_bytes(self) -> int | None:
        return self._clock.extra_bytes(self._ready()[0])

    def _ready(self) -> Calls:
        calls = self._prepare()
        self._fill()
        return calls


def interleave(clock: Clock, calls: Mapping[str, Call], samples: int) -> dict[str, list[float]]:
    """Warm up all calls, then sample them in random order; return the microseconds of all samples of each."""
    samplers = {name: Sampler(clock, lambda call=call: [call]) for name, call in calls.items()}
    for sampler in samplers.values():
        sampler.warm_up()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in shuffled_rounds(samplers, samples):
        times[name].append(samplers[name].sample().us)
    return times


def shuffled_rounds(names: Mapping[str, Any], rounds: int) -> Iterator[str]:
    """Yield all names in a new random order every round, so that clock drift and other load affect all alike."""
    order = list(names)
    for _ in range(rounds):
        random.shuffle(order)
        yield from order


def require_working_gpu(who: str) -> None:
    """Raise GPUUnusable if an earlier error has left the CUDA context of this process unusable."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise GPUUnusable(who, first_line(error)) from None


def tensors_in(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
