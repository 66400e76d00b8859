"""Time a kernel on changing inputs at changing addresses, and return the outputs of a sample on request."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.timer import MAX_WARM_UP, Call, Clock, Sampler
from tilewright.worker.execute import (
    KernelFailed,
    Request,
    flatten,
    gradients,
    is_plain_tensor,
    kernel_failures,
    leaves_of,
    unlimited_recompiles,
    without_onednn,
)
from tilewright.worker.memory import GUARD, GuardedTensor

SLOTS = 3  # at least; a sample with more calls has one per call
GRAPH_CALLS = 16  # per graph, so that launching it costs each call little
ROTATION_STEP = 64  # bytes


@dataclass
class TimedSample:
    us: float
    is_queued: bool  # the GPU never waited for the host


@dataclass
class Slot:
    """Arguments and incoming gradients in memory of their own."""

    request: Request
    args: list[Any]
    grads: list[Tensor | None]


class InputPool:
    """The values of several requests, copied into slots at different addresses. Kernels that take turns can share it.

    With `rotates`, unseen values are made by rotating a request's values in memory.
    """

    def __init__(self, requests: Sequence[Request], device: str, *, rotates: bool = True):
        self._requests = [_copy(request, device) for request in requests]
        self._device, self._rotates = device, rotates
        self._slots: list[Slot] = []
        self._grow(SLOTS)

    def take(self, count: int) -> list[Slot]:
        """Return `count` random slots."""
        self._grow(count)
        return random.sample(self._slots, count)

    def fill(self, slot: Slot, part: str, values: int | None) -> None:
        """Fill the arguments (`args`) or incoming gradients (`grads`) of a slot.

        `values` is the number of a request; None stands for the rotated values of a random one, which the kernel has
        not seen.
        """
        fresh = random.choice(self._requests) if values is None else self._requests[values]
        for target, new in zip(getattr(slot.request, part), getattr(fresh, part), strict=True):
            if isinstance(target, GuardedTensor) and isinstance(new, GuardedTensor):
                _fill(target, new, rotated=self._rotates and values is None)

    def _grow(self, count: int) -> None:
        while len(self._slots) < count:
            request = _copy(self._requests[0], self._device)
            args = [a.tensor() if isinstance(a, GuardedTensor) else a for a in request.args]
            self._slots.append(Slot(request, args, [g.tensor() if g else None for g in request.grads]))


class TimedRun:
    """Times `fn` in one direction: forward, backward or both."""

    def __init__(self, fn: Callable[..., Any], inputs: InputPool, direction: str, clock: Clock):
        self._direction = direction
        self._calls = _Calls(fn, inputs, direction)
        self._results: list[list[Tensor | None]] = []
        # Methods of this object would form a reference cycle that keeps the inputs in memory.
        self._sampler = Sampler(clock, self._calls.prepare, self._calls.fill)

    def warm_up(self, calls: int = 1, *, limit: float = MAX_WARM_UP) -> float:
        """Warm up for at most `limit` seconds, and return a rough time per call in microseconds."""
        self._calls.count = calls
        with self._mode():
            return self._sampler.warm_up(limit)

    def sample(self, values: int | None = None) -> TimedSample:
        """Time one sample on the values of this request, or on unseen values."""
        self._calls.values, self._results = values, []
        with self._mode():
            taken = self._sampler.sample(keep=lambda results: [_copies(result) for result in results])
        self._calls.values, self._results = None, taken.kept
        return TimedSample(taken.us, taken.is_queued)

    def results(self) -> list[Tensor | None]:
        """Return the outputs of a random call of the last sample. The kernel learns only now that they are checked."""
        return random.choice(self._results)

    def overhead(self) -> tuple[float, int | None]:
        """Return the host time per call in microseconds, and the peak memory beyond inputs and outputs in bytes."""
        with self._mode():
            can_repeat = self._direction != "backward"  # which frees its graph
            return self._sampler.host_us(back_to_back=can_repeat), self._sampler.extra_bytes()

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        """Entered once for many calls: entering costs the host as much as a small kernel."""
        with (
            kernel_failures(),
            unlimited_recompiles(),
            without_onednn(),
            torch.set_grad_enabled(self._direction != "forward"),
        ):
            yield


class GraphRun:
    """Times forward calls in a CUDA graph, each on inputs of its own, so that the host takes no part in them."""

    def __init__(self, fn: Callable[..., Any], inputs: InputPool, device: str, clock: Clock):
        self._slots = inputs.take(GRAPH_CALLS)
        self._values: list[int | None] = [None]
        self._results: list[list[Tensor | None]] = []
        calls = [functools.partial(fn, *slot.args) for slot in self._slots]
        with self._mode():
            calls[0]()  # a first call may compile and choose configurations, which cannot be captured
            self._replay, self._outputs = _graph_of(calls) if device == "cuda" else _repeated(calls)
        slots, values = self._slots, self._values
        fill = lambda: [inputs.fill(slot, "args", values[0]) for slot in slots]
        self._sampler = Sampler(clock, lambda: [self._replay], fill)

    def warm_up(self, calls: int = 1, *, limit: float = MAX_WARM_UP) -> float:
        """Warm up for at most `limit` seconds, and return a rough time per call in microseconds."""
        with self._mode():
            return self._sampler.warm_up(limit) / GRAPH_CALLS

    def sample(self, values: int | None = None) -> TimedSample:
        """Time one replay on the values of this request, or on unseen values; return the time per call."""
        self._values[0] = values
        with self._mode():
            taken = self._sampler.sample(keep=lambda _: [_copies(output) for output in self._outputs])
        self._values[0], self._results = None, taken.kept
        return TimedSample(taken.us / GRAPH_CALLS, taken.is_queued)

    def results(self) -> list[Tensor | None]:
        """Return the outputs of a random call of the last sample."""
        return random.choice(self._results)

    def overhead(self) -> tuple[float, int | None]:
        """Return the host time of a replay per call; its memory belongs to the graph."""
        return self._sampler.host_us(back_to_back=True) / GRAPH_CALLS, None

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with kernel_failures(), unlimited_recompiles(), without_onednn(), torch.no_grad():
            yield


def _graph_of(calls: Sequence[Call]) -> tuple[Call, list[Any]]:
    """Return a function that replays the calls as a CUDA graph, and their outputs, which each replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # Relaxed: kernels that only captured calls run are loaded here.
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            outputs = [call() for call in calls]
        finally:
            graph.capture_end()
    return graph.replay, outputs


def _repeated(calls: Sequence[Call]) -> tuple[Call, list[Any]]:
    """Return the same for a CPU, which has no graphs."""
    outputs: list[Any] = [None] * len(calls)

    def replay() -> None:
        outputs[:] = [call() for call in calls]

    return replay, outputs


class _Calls:
    """The calls of one sample."""

    def __init__(self, fn: Callable[..., Any], inputs: InputPool, direction: str):
        self._fn, self._inputs, self._direction = fn, inputs, direction
        self.count = 1
        self.values: int | None = None
        self._used: list[Slot] = []

    def prepare(self) -> list[Call]:
        self._used = self._inputs.take(self.count)
        if self._direction == "backward":
            for slot in self._used:
                self._inputs.fill(slot, "args", self.values)
        return [self._call(slot) for slot in self._used]

    def fill(self) -> None:
        for slot in self._used:
            if self._direction != "backward":
                self._inputs.fill(slot, "args", self.values)
            self._inputs.fill(slot, "grads", self.values)

    def _call(self, slot: Slot) -> Call:
        fn, args, needs_grad = self._fn, slot.args, slot.request.needs_grad
        if self._direction == "forward":
            return lambda: fn(*args)
        leaves = [a.detach().requires_grad_() if n in needs_grad else a for n, a in enumerate(args)]
        inputs = [leaves[n] for n in needs_grad]
        if self._direction == "both":

            def both() -> list[Any]:
                returned = fn(*leaves)
                return [returned, gradients(flatten(returned), inputs, slot.grads)]

            return both
        outputs = fn(*leaves)
        return lambda: gradients(flatten(outputs), inputs, slot.grads)


def _copy(request: Request, device: str) -> Request:
    args, grads = (
        [a.copy(device) if isinstance(a, GuardedTensor) else a for a in group]
        for group in (request.args, request.grads)
    )
    return Request(args, request.output_specs, request.returns_tensor, grads, request.needs_grad)


def _fill(target: GuardedTensor, new: GuardedTensor, *, rotated: bool) -> None:
    """Copy the bytes; rotate those of floating-point tensors by a random number of steps if `rotated`."""
    inside = slice(GUARD, len(new.memory) - GUARD)
    steps = len(new.memory[inside]) // ROTATION_STEP
    if not rotated or not new.dtype.is_floating_point or steps < 2:
        target.memory.copy_(new.memory)
        return
    by = ROTATION_STEP * random.randrange(1, steps)
    destination, origin = target.memory[inside], new.memory[inside]
    destination[by:].copy_(origin[:-by])
    destination[:by].copy_(origin[-by:])


_clone = Tensor.clone  # bound before a user's file can replace it


def _copies(result: Any) -> list[Tensor | None]:
    """Copy the tensors. A subclass, which could compute its values only when read, is refused."""
    found = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves_of(result)]
    for leaf in found:
        if leaf is not None and not is_plain_tensor(leaf):
            raise KernelFailed("wrong", f"returned {type(leaf).__name__}, not a tensor")
    with torch.no_grad():
        return [None if leaf is None else _clone(leaf) for leaf in found]
