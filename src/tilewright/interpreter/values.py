"""Values of the interpreter, and the base of the classes that compute them.

All programs of a batch run at once: axis 0 of every array is the program axis, of length 1 if all programs have the
same value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from tilewright.interpreter import numerics
from tilewright.interpreter.exceptions import Location, StepLimitExceeded, current_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewright.interpreter.memory import Memory

Bounds = tuple[int, int] | None


class Handle:
    """A value: its array, its Triton type and, for integers, their range and whether an offset wrapped around.

    `poison` marks the lanes that derive from memory that has not been written; None: no lane does. `layout` is Gluon's.
    """

    __slots__ = ("_bounds", "data", "dtype", "layout", "poison", "wrapped")

    def __init__(self, data: np.ndarray, dtype: tl.dtype, bounds: Bounds = None, wrapped: Wrap | None = None):
        self.poison: np.ndarray | None = None
        self.layout: Any = None
        self.data = data
        self.dtype: Any = dtype.scalar  # a pointer's has an element_ty
        self._bounds = bounds
        self.wrapped = wrapped and wrapped.reshaped(lambda lanes: np.broadcast_to(lanes, data.shape))

    @property
    def bounds(self) -> tuple[int, int]:
        """Lower and upper bound as signed integers, not necessarily tight."""
        if self._bounds is None:
            self._bounds = (int(self.data.min()), int(self.data.max())) if self.data.size else (0, 0)
        return self._bounds


@dataclass(frozen=True)
class Wrap:
    """An integer overflow: where it first happened, and the lanes whose values derive from it."""

    location: Location
    value: int  # the first value that did not fit
    bits: int
    lanes: np.ndarray

    def reshaped(self, reshape: Callable[[np.ndarray], np.ndarray]) -> Wrap:
        return replace(self, lanes=reshape(self.lanes))

    @staticmethod
    def of(*handles: Handle) -> Wrap | None:
        """Return the overflow of a value computed from these handles."""
        wraps = [h.wrapped for h in handles if h.wrapped is not None]
        if len(wraps) < 2:
            return wraps[0] if wraps else None
        return replace(wraps[0], lanes=functools.reduce(np.logical_or, [w.lanes for w in wraps]))


@dataclass(frozen=True, eq=False)
class BlockPointer:
    """The result of `tl.make_block_ptr`."""

    base: Handle
    shape: list[Handle]
    strides: list[Handle]
    offsets: list[Handle]
    block: list[int]


@dataclass(eq=False)
class DescriptorHandle:
    """A TMA descriptor."""

    base: Handle
    shape: list[Handle]
    strides: list[Handle]
    block: list[int]
    padding: Any
    round_to_tf32: bool = False


class Operations:
    """The base of the classes whose methods Triton's semantic layer calls."""

    memory: Memory
    programs: np.ndarray  # (batch, 3): the program ids of this batch
    grid: tuple[int, int, int]
    operations = 0
    operations_left = 0
    has_poison = False  # whether the launch has loaded memory that has not been written

    def tick(self) -> None:
        self.operations += 1
        self.operations_left -= 1
        if self.operations_left < 0:
            file, line = current_line()
            raise StepLimitExceeded(
                f"{file}:{line}: still running after {self.operations} operations; fix the endless loop or raise steps"
            )

    def _make(self, data: np.ndarray, like: Handle | tl.dtype, bounds: Bounds = None, wrapped: Any = None) -> Handle:
        self.tick()
        return Handle(data, like.dtype if isinstance(like, Handle) else like, bounds, wrapped)

    def _rounding(self, data: np.ndarray, like: Handle) -> Handle:
        return self._make(numerics.rounded(data, like.dtype), like)


def same_batch(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Broadcast the program axis of both arrays to the same length."""
    rows = max(a.shape[0], b.shape[0])
    return [np.broadcast_to(x, (rows, *x.shape[1:])) for x in (a, b)]
