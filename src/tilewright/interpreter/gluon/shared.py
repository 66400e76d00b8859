"""Shared memory of a batch of programs: allocations, views of them, and the last accesses to each element."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import triton.language as tl

from tilewright.interpreter import numerics
from tilewright.interpreter.gluon.order import Barrier, Event


class Allocation:
    """Memory from `allocate_shared_memory`; it is tracked in units, the elements it was allocated with."""

    def __init__(self, name: str, dtype: tl.dtype, shape: list[int], rows: int):
        units = math.prod(shape)
        self.name = name
        self.unit = numerics.itemsize(dtype)
        self.bytes = np.zeros((rows, units * self.unit), np.uint8)
        self.poison: np.ndarray | None = None  # per row and unit
        self.is_written = np.zeros(units, bool)
        self.writer = np.zeros(units, np.int32)  # number of the last event that wrote; 0: none
        self.readers: dict[Hashable, np.ndarray] = {}  # number of the last event that read, by owner of its clock
        self.forms: dict[Any, np.ndarray] = {}  # the units last written through views of each form
        self.barriers: dict[int, Barrier] = {}  # by unit


@dataclass(eq=False)
class View:
    """A buffer, as a kernel sees it: `index` holds the offset of each element, in elements of its type."""

    allocation: Allocation
    dtype: tl.dtype
    index: np.ndarray
    name: str
    form: Any = None  # what determines where elements lie; data stored in one form cannot be loaded in another
    layout: Any = None
    outside: str = ""  # describes an index out of bounds, which matters once the buffer is used

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape

    @property
    def nbytes(self) -> int:
        return self.index.size * numerics.itemsize(self.dtype)

    @property
    def units(self) -> np.ndarray:
        """Return the indices of the units of the elements, flat; a wide element has several."""
        size, unit = numerics.itemsize(self.dtype), self.allocation.unit
        flat = self.index.reshape(-1)
        if size == unit:
            return flat
        if size < unit:
            return flat * size // unit
        return (flat[:, None] * (size // unit) + np.arange(size // unit)).reshape(-1)

    def at(self, index: np.ndarray, name: str) -> View:
        return replace(self, index=index, name=name)

    def _elements(self) -> np.ndarray:
        return self.allocation.bytes.view(f"u{numerics.itemsize(self.dtype)}")

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the bits of the elements, and their poison."""
        poison = self.allocation.poison
        if poison is not None:
            poison = poison[:, self.units].reshape(poison.shape[0], *self.shape, -1).min(-1)
        return self._elements()[:, self.index], poison if poison is not None and poison.any() else None

    def write(self, bits: np.ndarray, poison: np.ndarray | None) -> None:
        self._elements()[:, self.index] = bits
        if poison is not None and self.allocation.poison is None:
            self.allocation.poison = np.zeros((self.allocation.bytes.shape[0], self.allocation.writer.size), np.int64)
        if self.allocation.poison is not None:
            rows = 0 if poison is None else np.broadcast_to(poison, (poison.shape[0], *self.shape))
            repeats = max(1, numerics.itemsize(self.dtype) // self.allocation.unit)
            flat = rows if isinstance(rows, int) else np.repeat(rows.reshape(rows.shape[0], -1), repeats, axis=1)
            self.allocation.poison[:, self.units] = flat

    def element(self, unit: int) -> tuple[int, ...]:
        """Return the index in the view of an element of `units`."""
        repeats = max(1, numerics.itemsize(self.dtype) // self.allocation.unit)
        return tuple(int(i) for i in np.unravel_index(unit // repeats, self.shape)) if self.shape else ()


def distinct(numbers: np.ndarray) -> Iterator[int]:
    """Iterate over the numbers in an array, which are mostly all the same."""
    if not numbers.size:
        return
    first = numbers[0]
    if (numbers == first).all():
        yield int(first)
    else:
        yield from np.unique(numbers).tolist()


def last_readers(allocation: Allocation, units: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over the events that last read these units, each with the numbers that its owner's events have there."""
    for table in allocation.readers.values():
        numbers = table[units]
        for number in distinct(numbers):
            yield number, numbers


def record(allocation: Allocation, units: np.ndarray, event: Event, number: int, writes: bool) -> None:
    """Remember an access."""
    if writes:
        allocation.writer[units] = number
        allocation.is_written[units] = True
        return
    if event.owner not in allocation.readers:
        allocation.readers[event.owner] = np.zeros(allocation.writer.size, np.int32)
    allocation.readers[event.owner][units] = number
