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
from tilewright.worker.memory import Placed
from tilewright.worker.stage import Request, any_number_of_graphs, failures, flat, without_onednn

SLOTS = 3  # places for inputs; more where a sample has more calls


@dataclass
class Lap:
    """One sample. `results` are those of one of its calls, if asked for."""

    us: float
    is_queued: bool
    results: list[Tensor | None] | None = None


@dataclass
class Slot:
    """A place for inputs: arguments and incoming gradients in memory of their own."""

    request: Request
    args: list[Any]
    grads: list[Tensor | None]


class Inputs:
    """Values of several requests, to be laid out in places that change. Kernels that take turns can share them."""

    def __init__(self, requests: Sequence[Request], device: str):
        self._requests = [_copy(request, device) for request in requests]
        self._slots: list[Slot] = []
        self._device = device

    def take(self, count: int, values: int | None = None) -> list[Slot]:
        """So many places, each with the values of one of the requests; of that number, or of any."""
        while len(self._slots) < max(SLOTS, count):
            request = _copy(self._requests[0], self._device)
            args = [a.tensor() if isinstance(a, Placed) else a for a in request.args]
            self._slots.append(Slot(request, args, [g.tensor() if g else None for g in request.grads]))
        return [self._refilled(slot, values) for slot in random.sample(self._slots, count)]

    def _refilled(self, slot: Slot, values: int | None) -> Slot:
        fresh = random.choice(self._requests) if values is None else self._requests[values]
        for mine, new in zip([*slot.request.args, *slot.request.grads], [*fresh.args, *fresh.grads], strict=True):
            if isinstance(mine, Placed) and isinstance(new, Placed):
                mine.memory.copy_(new.memory)
        return slot


class Track:
    """Runs `fn` in one direction: forward, backward or both."""

    def __init__(self, fn: Callable[..., Any], inputs: Inputs, direction: str, clock: Clock):
        self._fn, self._inputs, self._direction = fn, inputs, direction
        self._calls = 1
        self._values: int | None = None
        self._lane = Lane(clock, self._prepare)

    def warm_up(self, calls: int = 1) -> float:
        """Microseconds of a call, roughly."""
        self._calls = calls
        with self._mode():
            return self._lane.warm_up()

    def sample(self, look_at: int | None = None) -> Lap:
        """With results if they are looked at: those that the values of this number gave."""
        self._values, chosen = look_at, random.randrange(self._calls)
        with self._mode():
            taken = self._lane.sample(then=None if look_at is None else lambda results: _copies(results[chosen]))
        return Lap(taken.us, taken.is_queued, taken.kept)

    def aside(self) -> tuple[float, int | None]:
        """Host time of a call in microseconds, and the memory it needs beyond inputs and results."""
        with self._mode():
            return self._lane.host_us(), self._lane.extra_bytes()

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        """Set once for many calls: it would cost the host as much as a small kernel."""
        with failures(), any_number_of_graphs(), without_onednn(), torch.set_grad_enabled(self._direction != "forward"):
            yield

    def _prepare(self) -> list[Call]:
        return [self._call(slot) for slot in self._inputs.take(self._calls, self._values)]

    def _call(self, slot: Slot) -> Call:
        fn, args = self._fn, slot.args
        if self._direction == "forward":
            return lambda: fn(*args)
        leaves = [a.detach().requires_grad_() if n in slot.request.needs else a for n, a in enumerate(args)]
        wanted = [leaves[n] for n in slot.request.needs]
        if self._direction == "both":

            def both() -> list[Any]:
                returned = fn(*leaves)
                return [returned, _gradients(returned, wanted, slot.grads)]

            return both
        ready = fn(*leaves)
        return lambda: _gradients(ready, wanted, slot.grads)


def _gradients(returned: Any, wanted: list[Tensor], grads: list[Tensor | None]) -> Sequence[Tensor | None]:
    outputs = [o for o in flat(returned) if o.is_floating_point()]
    return torch.autograd.grad(outputs, wanted, grads, allow_unused=True)


def _copy(request: Request, device: str) -> Request:
    """The same in memory of its own."""
    copied = [
        [a.copy(device) if isinstance(a, Placed) else a for a in group] for group in (request.args, request.grads)
    ]
    return Request(copied[0], request.wanted, request.is_single, copied[1], request.needs)


def _copies(result: Any) -> list[Tensor | None]:
    leaves = pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None)
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else None for leaf in leaves]
