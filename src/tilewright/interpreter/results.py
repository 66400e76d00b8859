"""The result of one launch: the faults found and the bytes moved per argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

OUT_OF_BOUNDS = "out of bounds"
RACE = "race"
READ_BEFORE_WRITE = "read before write"
NEVER_WRITTEN = "never written"
OVERFLOW = "offset overflow"

SECTOR = 32  # bytes, the smallest transaction between a GPU's L2 and DRAM
WARP = 32  # lanes


@dataclass(frozen=True)
class Finding:
    """One fault, located at its first occurrence."""

    kind: str  # one of the constants above
    kernel: str
    argument: str
    file: str
    line: int
    program: tuple[int, int, int] | None  # None if the fault belongs to no single program
    element: tuple[int, ...]  # index in the tensor; outside of it, the offset from the first element
    lanes: int  # faulty accesses by this line and of this kind, summed over all programs
    detail: str  # completes the message: "load of element 100 of `x`, ..."

    @property
    def fault(self) -> tuple[Any, ...]:
        """The kind, the line and the argument: findings that share them are one fault of the kernel."""
        return self.kind, self.kernel, self.argument, self.file, self.line

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else ""
        program = f", program {self.program}" if self.program is not None else ""
        lanes = f" ({self.lanes} lanes)" if self.lanes > 1 and self.kind != NEVER_WRITTEN else ""
        return f"{where}{self.kind} in {self.kernel}{program}: {self.detail}{lanes}"


@dataclass
class Traffic:
    """Accesses of a launch to one tensor argument; byte counts exclude masked lanes."""

    name: str
    tensor: Tensor = field(repr=False)  # as passed to the kernel; the base tensor if a descriptor was passed
    loaded: int = 0  # bytes
    stored: int = 0  # bytes
    atomic: int = 0  # bytes read and written by atomics
    warps: int = 0  # warp-level atomic instructions executed
    lanes: int = 0  # lanes of all loads, stores and atomics, including masked ones
    masked: int = 0  # lanes disabled by a mask
    sectors: int = 0  # estimated 32-byte sectors moved
    distinct_read: int = 0  # bytes of the elements read, each counted once
    distinct_written: int = 0

    # Maps in the tensor's shape, present on request. Program indices count x fastest, then y, then z.
    reads: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32), repr=False)  # number per element
    writer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)  # program index + 1; 0: none

    def scaled(self, factor: float) -> Traffic:
        """Return the traffic of `factor` times as many programs."""
        linear = ("loaded", "stored", "atomic", "warps", "lanes", "masked", "sectors")
        limit = self.tensor.nbytes
        distinct = {n: min(limit, round(factor * getattr(self, n))) for n in ("distinct_read", "distinct_written")}
        return replace(self, **{name: round(factor * getattr(self, name)) for name in linear}, **distinct)

    @property
    def moved(self) -> int:
        """Bytes requested by loads, stores and atomics."""
        return self.loaded + self.stored + 2 * self.atomic

    @property
    def reads_per_element(self) -> float:
        """Average number of times each element that was read at all was read."""
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
    operations: int  # Triton operations executed; programs that run as one batch share them
    meta: dict[str, object] = field(default_factory=dict)  # num_warps, num_stages, constexpr arguments
    programs_run: int | None = None  # None: all of them

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def extrapolated(self) -> Launch:
        """The launch with its traffic scaled from the programs that ran to the whole grid."""
        if self.programs_run is None:
            return self
        factor = self.programs / self.programs_run
        return replace(self, arguments={name: t.scaled(factor) for name, t in self.arguments.items()})


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each fault, with the lanes of all: a kernel may be launched several times."""
    first: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        known = first.get(finding.fault)
        first[finding.fault] = finding if known is None else replace(known, lanes=known.lanes + finding.lanes)
    return list(first.values())


def tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in the arguments or the result of a function."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
