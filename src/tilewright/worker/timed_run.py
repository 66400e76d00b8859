"""A kernel that is timed: each sample has other inputs at other addresses, and its results can be asked for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.timer import Call, Clock, Lane
from tilewright.worker.execute import (
    KernelFailed,
    Request,
    any_number_of_graphs,
    failures,
    flat,
    gradients,
    without_onednn,
)
from tilewright.worker.memory import GUARD, Placed

SLOTS = 3  # places for inputs; more where a sample has more calls
STEP = 64  # bytes: what values are moved by is a multiple of it


@dataclass
class Lap:
    """One sample."""

    us: float
    is_queued: bool


@dataclass
class Slot:
    """A place for inputs: arguments and incoming gradients in memory of their own."""

    request: Request
    args: list[Any]
    grads: list[Tensor | None]


class Inputs:
    """Values of several requests, to be laid out in places that change. Kernels that take turns can share them.
    `moves`: these values in other places will do as well."""

    def __init__(self, requests: Sequence[Request], device: str, *, moves: bool = True):
        self._requests = [_copy(request, device) for request in requests]
        self._device, self._moves = device, moves
        self._slots: list[Slot] = []
        self._grow(SLOTS)

    def take(self, count: int) -> list[Slot]:
        """So many places."""
        self._grow(count)
        return random.sample(self._slots, count)

    def fill(self, slot: Slot, part: str, values: int | None) -> None:
        """The arguments (`args`) or incoming gradients (`grads`) of a place: the values of that number, or values that
        no one has seen, which are some of these in other places."""
        fresh = random.choice(self._requests) if values is None else self._requests[values]
        for mine, new in zip(getattr(slot.request, part), getattr(fresh, part), strict=True):
            if isinstance(mine, Placed) and isinstance(new, Placed):
                _fill(mine, new, moved=self._moves and values is None)

    def _grow(self, count: int) -> None:
        while len(self._slots) < count:
            request = _copy(self._requests[0], self._device)
            args = [a.tensor() if isinstance(a, Placed) else a for a in request.args]
            self._slots.append(Slot(request, args, [g.tensor() if g else None for g in request.grads]))


class Track:
    """Runs `fn` in one direction: forward, backward or both."""

    def __init__(self, fn: Callable[..., Any], inputs: Inputs, direction: str, clock: Clock):
        self._direction = direction
        self._calls = _Calls(fn, inputs, direction)
        self._results: list[list[Tensor | None]] = []
        # Of methods of this object there would be a ring, and its inputs stayed in memory until someone looked for it.
        self._lane = Lane(clock, self._calls.prepare, self._calls.fill)

    def warm_up(self, calls: int = 1) -> float:
        """Microseconds of a call, roughly."""
        self._calls.count = calls
        with self._mode():
            return self._lane.warm_up()

    def sample(self, values: int | None = None) -> Lap:
        """On the values of this number, or on others."""
        self._calls.values, self._results = values, []
        with self._mode():
            taken = self._lane.sample(then=lambda results: [_copies(result) for result in results])
        self._calls.values, self._results = None, taken.kept
        return Lap(taken.us, taken.is_queued)

    def results(self) -> list[Tensor | None]:
        """What one of the last sample's calls gave. Asked when it is too late to do better."""
        return random.choice(self._results)

    def aside(self) -> tuple[float, int | None]:
        """Host time of a call in microseconds, and the memory it needs beyond inputs and results."""
        with self._mode():
            can_repeat = self._direction != "backward"  # whose graph is gone after it
            return self._lane.host_us(in_a_row=can_repeat), self._lane.extra_bytes()

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        """Set once for many calls: it would cost the host as much as a small kernel."""
        with failures(), any_number_of_graphs(), without_onednn(), torch.set_grad_enabled(self._direction != "forward"):
            yield


class _Calls:
    """The calls of a sample, so many of them, on the values of a number or on others."""

    def __init__(self, fn: Callable[..., Any], inputs: Inputs, direction: str):
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
        fn, args = self._fn, slot.args
        if self._direction == "forward":
            return lambda: fn(*args)
        leaves = [a.detach().requires_grad_() if n in slot.request.needs else a for n, a in enumerate(args)]
        wanted = [leaves[n] for n in slot.request.needs]
        if self._direction == "both":

            def both() -> list[Any]:
                returned = fn(*leaves)
                return [returned, gradients(flat(returned), wanted, slot.grads)]

            return both
        ready = fn(*leaves)
        return lambda: gradients(flat(ready), wanted, slot.grads)


def _copy(request: Request, device: str) -> Request:
    """The same in memory of its own."""
    copied = [
        [a.copy(device) if isinstance(a, Placed) else a for a in group] for group in (request.args, request.grads)
    ]
    return Request(copied[0], request.wanted, request.is_single, copied[1], request.needs)


def _fill(mine: Placed, new: Placed, *, moved: bool) -> None:
    """With the same bytes; `moved`: round by some, where numbers are just numbers."""
    inside = slice(GUARD, len(new.memory) - GUARD)
    steps = len(new.memory[inside]) // STEP
    if not moved or not new.dtype.is_floating_point or steps < 2:
        mine.memory.copy_(new.memory)
        return
    by = STEP * random.randrange(1, steps)
    to, of = mine.memory[inside], new.memory[inside]
    to[by:].copy_(of[:-by])
    to[:by].copy_(of[-by:])


_leaves, _clone = pytree.tree_leaves, Tensor.clone  # as they are before a file is loaded


def _copies(result: Any) -> list[Tensor | None]:
    """Copies of the tensors, none of which may be of a kind that is made only when it is looked at."""
    found = [leaf if isinstance(leaf, Tensor) else None for leaf in _leaves(result, is_leaf=lambda leaf: leaf is None)]
    for leaf in found:
        if leaf is not None and type(leaf) not in (Tensor, torch.nn.Parameter):
            raise KernelFailed("wrong", f"returned {type(leaf).__name__}, not a tensor")
    with torch.no_grad():
        return [None if leaf is None else _clone(leaf) for leaf in found]
