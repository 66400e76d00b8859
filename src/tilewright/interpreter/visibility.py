"""Stores that other warps of the same program may not see yet.

The threads of a program run a store and a later load without waiting for each other, so a warp may load an element
before another warp has stored it, unless a barrier lies in between. Which warp has a lane is the compiler's choice:
this assumes its usual layout, and that everything that passes data between lanes ends in a barrier. Only a load in a
line below the store counts: a loop that looks into a table which it fills may be right with old values too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tilewright.interpreter.exceptions import Location
from tilewright.interpreter.results import WARP

if TYPE_CHECKING:
    from tilewright.interpreter.arguments import Buffer
    from tilewright.interpreter.lanes import Part

VECTOR = 16  # bytes that a thread accesses at once


class Stored(NamedTuple):
    """A store since the last barrier."""

    line: int
    units: np.ndarray
    programs: np.ndarray
    warps: np.ndarray


class Marks(NamedTuple):
    """The last store to each unit of a buffer: its number, from 1 on, its line, its program and its warp."""

    number: np.ndarray
    line: np.ndarray
    program: np.ndarray
    warp: np.ndarray


class UnseenStores:
    """The stores of the running programs since their last barrier."""

    warps = 1  # per program

    def __init__(self) -> None:
        self._count = 0  # stores so far
        self._seen = 0  # the number of the last store before the last barrier
        self._stored: dict[int, list[tuple[int, Stored]]] = defaultdict(list)  # by buffer; marked when it is loaded
        self._marks: dict[tuple[int, int], Marks] = {}  # by buffer and its unit, which a later argument may reduce

    def synchronize(self) -> None:
        self._seen = self._count
        self._stored.clear()

    def add(self, part: Part, itemsize: int, programs: np.ndarray, changed: np.ndarray, location: Location) -> None:
        """Add a store that changed some of the active lanes of a part."""
        if self.warps == 1 or part.lanes is not None or not changed.any():
            return
        units, warps = self._lanes(part, itemsize)
        changed = np.repeat(changed, len(units) // len(changed))
        programs = np.repeat(programs, len(units) // len(programs))
        self._count += 1
        stored = Stored(location[1], units[changed], programs[changed], warps[changed])
        self._stored[id(part.argument.buffer)].append((self._count, stored))

    def may_miss(self, part: Part) -> bool:
        """Return whether the buffer of a load has been stored to since the last barrier."""
        return part.lanes is None and id(part.argument.buffer) in self._stored

    def missed(
        self, part: Part, itemsize: int, programs: np.ndarray | None, location: Location
    ) -> tuple[np.ndarray, int] | None:
        """Return the active lanes of a load whose element another warp stored, and the line. None: no such lane.

        `programs` has the program of each lane; None: every program of the batch makes this load.
        """
        buffer = part.argument.buffer
        marks = self._marked(buffer)
        units, warps = self._lanes(part, itemsize)
        missed = (marks.number[units] > self._seen) & (marks.warp[units] != warps) & (marks.line[units] < location[1])
        if programs is not None and len(programs):
            missed &= marks.program[units] == np.repeat(programs, len(units) // len(programs))
        if not missed.any():
            return None
        line = int(marks.line[units][missed][0])
        return missed.reshape(-1, max(1, itemsize // buffer.unit)).any(1), line

    def _marked(self, buffer: Buffer) -> Marks:
        """Mark the stores to a buffer, which waits until it is loaded: most are never both."""
        key = id(buffer), buffer.unit
        if key not in self._marks:
            count = len(buffer.bytes) // buffer.unit
            self._marks[key] = Marks(*(np.zeros(count, np.int32) for _ in Marks._fields))
        marks = self._marks[key]
        for number, stored in self._stored[id(buffer)]:
            marks.number[stored.units], marks.line[stored.units] = number, stored.line
            marks.program[stored.units], marks.warp[stored.units] = stored.programs, stored.warps
        self._stored[id(buffer)] = []
        return marks

    def _lanes(self, part: Part, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the units of the active lanes of a part, and the warp of each."""
        count = math.prod(part.offsets.shape[1:])
        vector = max(1, min(VECTOR // itemsize, count // (WARP * self.warps)))
        warp = (np.arange(count) // (WARP * vector) % self.warps).reshape(1, *part.offsets.shape[1:])
        warps, units = part.select(np.broadcast_to(warp, part.offsets.shape)), part.select(part.offsets)
        unit = part.argument.buffer.unit
        covered = max(1, itemsize // unit)  # a wide access covers several units
        if covered > 1:
            return (units[:, None] // unit + np.arange(covered)).reshape(-1), np.repeat(warps, covered)
        return units // unit, warps
