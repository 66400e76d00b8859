"""Poison: the lanes of a value that derive from memory that has not been written.

A value has poison only if one of its lanes does. It is an array that broadcasts to the value's: 0 in a clean lane, and
a negative number that identifies the lane of the load elsewhere, so that `np.minimum` joins two values and keeps the
first load. `tl.where` discards it; a store, an address, a mask or a branch reports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST = -(2**62)  # the number of the first poisoned lane of a batch


@dataclass
class Source:
    """An access that read memory that has not been written; the lanes of its part are numbered from `first`."""

    first: int
    part: Any
    location: tuple[str, int]
    lanes: int
    is_reported: bool = False


def joined(*poison: np.ndarray | None) -> np.ndarray | None:
    """Return the poison of a value that is computed lane by lane from values with this poison."""
    some = [p for p in poison if p is not None]
    return functools.reduce(np.minimum, some) if some else None


def selected(condition: Any, a: Any, b: Any) -> np.ndarray | None:
    """Return the poison of `where(condition, a, b)`; None stands for a clean value."""
    sides = [0 if side is None or side.poison is None else side.poison for side in (a, b)]
    if all(isinstance(side, int) for side in sides):
        return condition.poison
    return joined(np.where(condition.data, *sides), condition.poison)


def reduced(handles: list[Any], axis: int) -> np.ndarray | None:
    """Return the poison of a reduction over an axis."""
    poison = _elementwise(None, *handles)
    return None if poison is None else poison.min(axis)


def scanned(handles: list[Any], axis: int, reverse: bool) -> np.ndarray | None:
    """Return the poison of a scan: a poisoned element reaches all that follow."""
    poison = _elementwise(None, *handles)
    if poison is None:
        return None
    along = slice(None, None, -1 if reverse else 1)
    index = (slice(None),) * axis + (along,)
    return np.minimum.accumulate(poison[index], axis)[index]


def packed(handles: list[Any], size: int) -> np.ndarray | None:
    """Return the poison of a function that maps groups of `size` neighbours to groups."""
    poison = _elementwise(None, *handles)
    if poison is None:
        return None
    groups = poison.reshape(poison.shape[0], -1, size).min(-1, keepdims=True)
    return np.repeat(groups, size, axis=-1).reshape(poison.shape)


def _elementwise(_out: Any, *args: Any) -> np.ndarray | None:
    handles = [h for arg in args for h in (arg if isinstance(arg, list) else [arg])]
    return joined(*(np.broadcast_to(h.poison, h.data.shape) for h in handles if getattr(h, "poison", None) is not None))


def _select(_out: Any, condition: Any, a: Any, b: Any) -> np.ndarray | None:
    return selected(condition, a, b)


def _absorbing(absorbs: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray | None]:
    """Return the rule of an operation that a clean operand can decide alone, as 0 decides `a & b`."""

    def rule(_out: Any, a: Any, b: Any) -> np.ndarray | None:
        poison = _elementwise(None, a, b)
        if poison is None:
            return None
        decides = [absorbs(h.data) & (True if h.poison is None else h.poison == 0) for h in (a, b)]
        return np.where(decides[0] | decides[1], 0, poison)

    return rule


def _dot(_out: Any, a: Any, b: Any, acc: Any, *_: Any) -> np.ndarray | None:
    rows = None if a.poison is None else np.broadcast_to(a.poison, a.data.shape).min(-1, keepdims=True)
    columns = None if b.poison is None else np.broadcast_to(b.poison, b.data.shape).min(-2, keepdims=True)
    return joined(rows, columns, acc.poison)


def _dot_scaled(out: Any, a: Any, a_scale: Any, _a: Any, b: Any, b_scale: Any, *rest: Any) -> np.ndarray | None:
    scales = [
        np.broadcast_to(scale.poison, scale.data.shape).min(-1)
        for scale in (a_scale, b_scale)
        if scale is not None and scale.poison is not None
    ]
    spread = [scale.reshape(scale.shape[0], *[1] * (out.data.ndim - 1)) for scale in (s.min(-1) for s in scales)]
    return joined(_dot(out, a, b, rest[-1]), *spread)


def _histogram(_out: Any, value: Any, _bins: int, mask: Any) -> np.ndarray | None:
    poison = value.poison if mask is None else selected(mask, value, None)
    return None if poison is None else poison.min(-1, keepdims=True)


def _gather(_out: Any, source: Any, index: Any, axis: int) -> np.ndarray | None:
    taken = None
    if source.poison is not None:
        rows = max(source.data.shape[0], index.data.shape[0])
        poison = np.broadcast_to(source.poison, (rows, *source.data.shape[1:]))
        where = np.broadcast_to(index.data, (rows, *index.data.shape[1:])).astype(np.int64)
        taken = np.take_along_axis(poison, where, axis + 1)
    return joined(taken, index.poison)


def _pair(combine: Callable[[list[np.ndarray]], np.ndarray]) -> Callable[..., np.ndarray | None]:
    """Return the rule of an operation that puts two values together."""

    def rule(out: Any, a: Any, b: Any) -> np.ndarray | None:
        if a.poison is None and b.poison is None:
            return None
        rows = out.data.shape[0]
        return combine(
            [np.broadcast_to(0 if h.poison is None else h.poison, (rows, *h.data.shape[1:])) for h in (a, b)]
        )

    return rule


_RULES: dict[str, Callable[..., np.ndarray | None]] = {
    "select": _select,
    "and": _absorbing(lambda data: data == 0),
    "or": _absorbing(lambda data: data if data.dtype == bool else data == -1),
    "dot": _dot,
    "dot_scaled": _dot_scaled,
    "histogram": _histogram,
    "gather": _gather,
    "cat": _pair(lambda both: np.concatenate(both, axis=1)),
    "join": _pair(lambda both: np.stack(both, axis=-1)),
}
# These reshape poison themselves, report it, or have no operand.
_OTHERS = {
    "splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "split", "load", "masked_load", "store",
    "masked_store", "atomic_rmw", "atomic_cas", "atomic_load", "atomic_store", "atomic_poll", "make_block_ptr",
    "advance", "tensor_pointer_load", "tensor_pointer_store", "make_tensor_descriptor", "descriptor_load",
    "descriptor_store", "descriptor_reduce", "descriptor_gather", "descriptor_scatter", "get_program_id",
    "get_num_programs", "make_range", "print", "assert", "assume", "barrier", "grid_dependency_wait",
    "grid_dependency_launch_dependents", "inline_asm",
}  # fmt: skip


def track(builder: type) -> None:
    """Make the operations of a builder propagate poison: lane by lane unless they have a rule of their own."""
    for name in [n for n in dir(builder) if n.startswith("create_")]:
        operation = name.removeprefix("create_")
        if operation not in _OTHERS:
            setattr(builder, name, _tracking(getattr(builder, name), _RULES.get(operation, _elementwise)))


def _tracking(method: Callable[..., Any], rule: Callable[..., np.ndarray | None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        out = method(self, *args)
        if self.has_poison and hasattr(out, "poison"):
            out.poison = rule(out, *args)
        return out

    return call
