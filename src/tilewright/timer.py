"""Device time of one call. Before each sample the cache is emptied, and the GPU is kept busy until the host has queued
all there is to time, so that two events see the device alone."""

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

CACHES = 4  # times the L2: what is read to empty it
SLEEP_HZ = 2.0e9  # cycles that torch.cuda._sleep spends in a second, about
FIRST_AHEAD = 50e-6  # seconds: more than any flush needs to be queued
LONGEST_AHEAD = 0.1
ATTEMPTS = 6  # to queue a sample in time, each with twice the head start
HOST_CALLS = 20
GROUP = 5  # samples whose medians are compared
STEADY = 0.01  # of the median, between two groups
WARM_UP_SECONDS = 0.5

Call = Callable[[], Any]
Keep = Callable[[list[Any]], Any]


def _nothing() -> None: ...


@dataclass
class Sample:
    us: float  # of one call
    is_queued: bool = True  # the GPU came to it only after all of it was queued
    kept: Any = None


class Clock(Protocol):
    """What takes a sample: the GPU's events, or this machine's clock where the tensors are on the CPU."""

    def sample(self, calls: Sequence[Call], ahead: float, fill: Call = _nothing, then: Keep | None = None) -> Sample:
        """The time of one of these calls, back to back. `fill` puts inputs in their places just before; `then` makes
        what is kept of the results just after."""
        ...

    def settle(self) -> None:
        """Wait for all work to end."""
        ...

    def extra_bytes(self, call: Call) -> int | None:
        """Memory that a call needs at its peak beyond what it returns; None where no one counts."""
        ...


class Timer:
    """Events on the current CUDA stream. `flush` (by reading, by writing, or none) and `queues` are there to show what
    goes wrong otherwise."""

    def __init__(self, *, flush: str = "read", queues: bool = True) -> None:
        self._flush, self._queues = flush, queues
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cold = torch.randn(CACHES * l2 // 4, device="cuda")
        self._sink = torch.empty((), device="cuda")
        self._driver = ctypes.CDLL("libcuda.so.1") if torch.version.cuda else None

    def sample(self, calls: Sequence[Call], ahead: float, fill: Call = _nothing, then: Keep | None = None) -> Sample:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream()
        self.settle()
        if self._driver:
            self._driver.cuCtxResetPersistingL2Cache()  # lines that a kernel asked to keep outlive any flush
        if self._queues:
            torch.cuda._sleep(int(ahead * SLEEP_HZ))
        fill()  # in the queue, behind the wait: work on another stream that does not wait finds other inputs
        if self._flush == "read":  # lines written to would go out to memory while the call is timed
            torch.sum(self._cold, dim=0, out=self._sink)
        elif self._flush == "write":
            self._cold.zero_()
        start.record(stream)
        results = [call() for call in calls]
        end.record(stream)
        is_queued = not start.query()
        torch.cuda.set_stream(stream)  # a call may have left another one
        kept = then(results) if then else None
        self.settle()  # what it left on other streams must not run in the next one's time
        return Sample(start.elapsed_time(end) * 1e3 / max(1, len(calls)), is_queued or not self._queues, kept)

    def settle(self) -> None:
        torch.cuda.synchronize()

    def extra_bytes(self, call: Call) -> int | None:
        self.settle()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        returned = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(call())}
        return max(0, torch.cuda.max_memory_allocated() - before - sum(returned.values()))

    def interleave(self, calls: Mapping[str, Call], samples: int) -> dict[str, list[float]]:
        """Microseconds of every sample of every call."""
        return interleave(self, calls, samples)


class HostTimer:
    """The host's clock, for tensors that are on the CPU."""

    def sample(self, calls: Sequence[Call], ahead: float, fill: Call = _nothing, then: Keep | None = None) -> Sample:
        fill()
        begin = time.perf_counter()
        results = [call() for call in calls]
        spent = time.perf_counter() - begin
        return Sample(spent * 1e6 / max(1, len(calls)), True, then(results) if then else None)

    def settle(self) -> None: ...

    def extra_bytes(self, call: Call) -> int | None:
        return None


def timer_for(device: str) -> Clock:
    return Timer() if device == "cuda" else HostTimer()


def floor_us(clock: Clock) -> float:
    """What the clock says of nothing at all."""
    return median(clock.sample([], FIRST_AHEAD).us for _ in range(50))


class Lane:
    """One of several callables that take turns. `prepare` makes the next sample's calls, `fill` puts their inputs in
    place."""

    def __init__(self, clock: Clock, prepare: Callable[[], Sequence[Call]], fill: Call = _nothing):
        self._clock, self._prepare, self._fill = clock, prepare, fill
        self._ahead, self._attempts = FIRST_AHEAD, ATTEMPTS

    def sample(self, then: Keep | None = None) -> Sample:
        ahead = self._ahead
        taken = self._clock.sample(self._prepare(), ahead, self._fill, then)
        for _ in range(self._attempts):
            if taken.is_queued:
                break
            ahead = min(2 * ahead, LONGEST_AHEAD)
            taken = self._clock.sample(self._prepare(), ahead, self._fill, then)
        if taken.is_queued:
            self._ahead = ahead
        else:
            self._attempts = 0  # it waits for the GPU on its way: no head start helps
        return taken

    def warm_up(self) -> float:
        """Compile, then go on until two groups of samples agree. The time of one."""
        calls = self._ready()
        for call in calls:
            call()
        self._ahead = min(self._ahead + 1.5e-6 * self.host_us() * len(calls), LONGEST_AHEAD)
        self._attempts = ATTEMPTS
        begin, last = time.monotonic(), float("inf")
        while True:
            now = median(self.sample().us for _ in range(GROUP))
            if abs(now - last) <= STEADY * now or time.monotonic() - begin > WARM_UP_SECONDS:
                return now
            last = now

    def host_us(self, *, in_a_row: bool = False) -> float:
        """Host time of one call, from asking to returning: with nothing queued before it or, in a row, the same call.
        After a wait for the GPU a host is slow for a while. The least of several: what else the machine does can only
        add to it."""
        taken = []
        with _without_collection():
            while len(taken) < HOST_CALLS:
                for call in self._ready():
                    self._clock.settle()
                    if in_a_row:
                        call()
                        self._fill()
                    begin = time.perf_counter()
                    call()
                    taken.append(time.perf_counter() - begin)
        self._clock.settle()
        return min(taken) * 1e6

    def extra_bytes(self) -> int | None:
        return self._clock.extra_bytes(self._ready()[0])

    def _ready(self) -> Sequence[Call]:
        calls = self._prepare()
        self._fill()
        return calls


def interleave(clock: Clock, calls: Mapping[str, Call], samples: int) -> dict[str, list[float]]:
    """Microseconds of every sample of every call, after all are warm."""
    lanes = {name: Lane(clock, lambda call=call: [call]) for name, call in calls.items()}
    for lane in lanes.values():
        lane.warm_up()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(lanes, samples):
        taken[name].append(lanes[name].sample().us)
    return taken


def turns(names: Mapping[str, Any], rounds: int) -> Iterator[str]:
    """Every round all of them in a new random order: a drifting clock or a busy neighbour falls on all alike."""
    order = list(names)
    for _ in range(rounds):
        random.shuffle(order)
        yield from order


def require_working_gpu(who: str) -> None:
    """After some errors the driver answers nothing more in this process."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise GPUUnusable(who, first_line(error)) from None


def tensors_in(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
