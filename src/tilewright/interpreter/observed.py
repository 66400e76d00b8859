"""What one launch did: the faults found in it and the bytes it moved, argument by argument."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

OUT_OF_BOUNDS = "out of bounds"
RACE = "race"
READ_BEFORE_WRITE = "read before write"
NEVER_WRITTEN = "never written"
OVERFLOW = "offset overflow"

SECTOR = 32  # bytes: the least that a GPU fetches from or writes to memory


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
        return f"{where}{self.kind} in {self.kernel}{program}: {self.detail}"


@dataclass
class Traffic:
    """What a launch did to one tensor argument. Counts of bytes are of lanes that no mask turned off."""

    name: str
    tensor: Tensor  # as it was given to the kernel; descriptors stand for their base
    loaded: int = 0  # bytes
    stored: int = 0
    atomic: int = 0  # read and written by atomics
    lanes: int = 0  # of loads, stores and atomics, whether on or off
    masked: int = 0  # of those, turned off by a mask
    sectors: int = 0  # estimated, 32 bytes each: what the memory system moves for these accesses
    reads: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))  # times each element was read
    writer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # program number + 1; 0: none wrote

    # `reads` and `writer` have the tensor's shape; a program's number counts x fastest, then y, then z.

    @property
    def moved(self) -> int:
        """Bytes requested."""
        return self.loaded + self.stored + 2 * self.atomic

    @property
    def distinct_read(self) -> int:
        """Bytes of the elements that were read at least once; an element of an expanded tensor counts once."""
        return int(np.count_nonzero(_without_repeats(self.reads, self.tensor))) * self.tensor.element_size()

    @property
    def distinct_written(self) -> int:
        return int(np.count_nonzero(_without_repeats(self.writer, self.tensor))) * self.tensor.element_size()

    @property
    def reads_per_element(self) -> float:
        """How often each element that was read was fetched, on average."""
        distinct = self.distinct_read
        return (self.loaded + self.atomic) / distinct if distinct else 0.0


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

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


def _without_repeats(per_element: np.ndarray, tensor: Tensor) -> np.ndarray:
    """One of each element that a stride of 0 repeats."""
    return per_element[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())]


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
