"""What one launch did: the faults found in it and the bytes it moved, argument by argument."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

OUT_OF_BOUNDS = "out of bounds"
RACE = "race"
READ_BEFORE_WRITE = "read before write"
NEVER_WRITTEN = "never written"
OVERFLOW = "offset overflow"

SECTOR = 32  # bytes: the least that a GPU fetches from or writes to memory
WARP = 32  # lanes


@dataclass(frozen=True)
class Finding:
    """One fault, at the first place where it was seen."""

    kind: str  # one of the constants above
    kernel: str
    argument: str
    file: str
    line: int
    program: tuple[int, int, int] | None  # None: of no one program
    element: tuple[int, ...]  # of a tensor: its index; outside of one: how many elements from its first
    lanes: int  # how many accesses of that line and kind were at fault, over all programs
    detail: str  # what happened there, as part of a sentence

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else ""
        program = f", program {self.program}" if self.program is not None else ""
        lanes = f" ({self.lanes} lanes)" if self.lanes > 1 and self.kind != NEVER_WRITTEN else ""
        return f"{where}{self.kind} in {self.kernel}{program}: {self.detail}{lanes}"


@dataclass
class Traffic:
    """What a launch did to one tensor argument. Counts of bytes are of lanes that no mask turned off."""

    name: str
    tensor: Tensor  # as it was given to the kernel; descriptors stand for their base
    loaded: int = 0  # bytes
    stored: int = 0
    atomic: int = 0  # read and written by atomics
    warps: int = 0  # that made them, each as often as it did
    lanes: int = 0  # of loads, stores and atomics, whether on or off
    masked: int = 0  # of those, turned off by a mask
    sectors: int = 0  # estimated, 32 bytes each: what the memory system moves for these accesses
    distinct_read: int = 0  # bytes of the elements that were read; one of an expanded tensor counts once
    distinct_written: int = 0

    # Maps in the tensor's shape, where they were asked for. A program's number counts x fastest, then y, then z.
    reads: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))  # times each element was read
    writer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # program number + 1; 0: none wrote

    def times(self, factor: float) -> Traffic:
        """Of so many times more programs."""
        more = ("loaded", "stored", "atomic", "warps", "lanes", "masked", "sectors")
        bytes_ = self.tensor.nbytes
        touched = {n: min(bytes_, round(factor * getattr(self, n))) for n in ("distinct_read", "distinct_written")}
        return replace(self, **{name: round(factor * getattr(self, name)) for name in more}, **touched)

    @property
    def moved(self) -> int:
        """Bytes requested."""
        return self.loaded + self.stored + 2 * self.atomic

    @property
    def reads_per_element(self) -> float:
        """How often each element that was read was fetched, on average."""
        return (self.loaded + self.atomic) / self.distinct_read if self.distinct_read else 0.0


@dataclass
class Launch:
    """One launch of one kernel."""

    kernel: str
    file: str
    line: int
    grid: tuple[int, int, int]
    arguments: dict[str, Traffic]
    findings: list[Finding]
    operations: int  # of Triton, executed; programs that go the same way share them
    meta: dict[str, object] = field(default_factory=dict)  # num_warps, num_stages, constexpr arguments
    ran: int | None = None  # programs, where not all did

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def whole(self) -> Launch:
        """Of all programs, if those that did not run are like those that did: each tensor moves so many times more, but
        has no more elements than it has."""
        if self.ran is None:
            return self
        return replace(self, arguments={n: t.times(self.programs / self.ran) for n, t in self.arguments.items()})


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in a function's arguments or result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
