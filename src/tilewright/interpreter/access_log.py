"""The memory accesses of a launch: traffic per argument, and data races."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from triton._C.libtriton import ir

from tilewright.interpreter.arguments import Argument
from tilewright.interpreter.lanes import Access
from tilewright.interpreter.memory import Memory
from tilewright.interpreter.results import RACE, WARP, Finding, Traffic, merged

CHUNK_BITS = 24  # distinct elements are counted only in chunks with an access, not in all of a large tensor
CHUNK = 1 << CHUNK_BITS  # units
ACQUIRE = {ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
RELEASE = {ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}


class LastAccesses:
    """The programs that last accessed each unit of a storage, as program index + 1; 0: none.

    Arrays are allocated as zeros on first use, so untouched pages of large storages take no memory.
    """

    def __init__(self, units: int):
        self._units = units
        self.reader = self._zeros()
        self.second_reader = self._zeros()  # another program than `reader`
        self.writer: np.ndarray | None = None
        self.changer: np.ndarray | None = None  # the last writer that changed the value
        self.updater: np.ndarray | None = None  # the last atomic that changed the value
        self.times: dict[str, np.ndarray] = {}  # time of each access above, kept once an atomic has synchronized

    def _zeros(self) -> np.ndarray:
        return np.zeros(self._units, np.int32)

    def track_stores(self) -> None:
        if self.writer is None:
            self.writer, self.changer = self._zeros(), self._zeros()

    def track_atomics(self) -> None:
        if self.updater is None:
            self.updater = self._zeros()

    def track_times(self) -> None:
        if not self.times:
            roles = ("reader", "second_reader", "writer", "changer", "updater")
            self.times = {role: self._zeros() for role in roles}

    def set(self, role: str, index: np.ndarray, program: Any, time: Any) -> None:
        getattr(self, role)[index] = program
        if self.times:
            self.times[role][index] = time

    def time(self, role: str, index: np.ndarray) -> np.ndarray | int:
        return self.times[role][index] if self.times else 0


class AccessLog:
    """Accumulates the accesses of all batches, in the order in which they ran."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._findings: list[Finding] = []
        self._last: dict[int, LastAccesses] = {}
        self._counts: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # reads, writer, chunks accessed
        self._totals: dict[str, Traffic] = {}
        self._clock = 0
        # Synchronizing atomics by address, as (time, program, acquires, releases), and acquires by program.
        self._synchronized: dict[tuple[int, int], list[tuple[int, int, bool, bool]]] = defaultdict(list)
        self._acquired: dict[int, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        self._visible: dict[tuple[Any, ...], tuple[dict[int, int], Iterator[tuple[int, int]]]] = {}  # `_visible_to`

    def commit(self) -> None:
        """Add the accesses of the current batch and clear its log."""
        self._findings += self._memory.findings
        for access in self._memory.accesses:
            self._clock += 1
            index = self._units(access)
            programs = np.broadcast_to(self._programs(access, len(index)), index.shape)
            self._count(access, index, programs)
            if len(index):
                self._check(access, index, programs)
        self._findings = merged(self._findings)
        self._memory.clear_log()

    @property
    def findings(self) -> list[Finding]:
        return self._findings

    def traffic(self, maps: bool) -> dict[str, Traffic]:
        """Return the traffic per argument; `maps` adds the readers and the writer of each element."""
        for argument in self._memory.arguments:
            total = self._total(argument)
            if argument.name in self._counts:
                step = argument.itemsize // argument.buffer.unit
                reads, writer, chunks = self._counts[argument.name]
                for chunk in np.flatnonzero(chunks):
                    part = slice(chunk * CHUNK, (chunk + 1) * CHUNK, step)
                    total.distinct_read += int(np.count_nonzero(reads[part])) * argument.itemsize
                    total.distinct_written += int(np.count_nonzero(writer[part])) * argument.itemsize
                if maps:
                    total.reads, total.writer = argument.shaped(reads[::step]), argument.shaped(writer[::step])
        return {argument.name: self._total(argument) for argument in self._memory.arguments}

    def _total(self, argument: Argument) -> Traffic:
        return self._totals.setdefault(argument.name, Traffic(argument.name, argument.tensor))

    def _count(self, access: Access, index: np.ndarray, programs: np.ndarray) -> None:
        argument, total = access.argument, self._total(access.argument)
        batch = len(self._memory.programs)
        repeats = batch if access.programs is None else 1
        lanes = len(access.offsets) * repeats
        total.lanes += access.lanes
        total.masked += access.lanes - lanes
        total.sectors += access.sectors * (2 if access.kind == "atomic" else 1)
        moved = lanes * access.itemsize
        if access.kind == "load":
            total.loaded += moved
        elif access.kind == "store":
            total.stored += moved
        else:
            total.atomic += moved
            total.warps += batch * math.ceil(access.lanes / batch / WARP)
        if argument.name not in self._counts:
            units = argument.span * argument.itemsize // argument.buffer.unit
            chunks = np.zeros(units // CHUNK + 1, bool)
            self._counts[argument.name] = np.zeros(units, np.uint32), np.zeros(units, np.int32), chunks
        reads, writer, chunks = self._counts[argument.name]
        index = index - argument.first_byte // argument.buffer.unit
        chunks[index >> CHUNK_BITS if len(chunks) > 1 else 0] = True
        if access.kind != "store":
            np.add.at(reads, index, np.uint32(repeats))
        if access.kind != "load":
            writer[index] = programs

    def _units(self, access: Access) -> np.ndarray:
        """Return the indices of the units accessed; a wide access covers several."""
        unit = access.argument.buffer.unit
        index: np.ndarray = access.offsets // unit
        return (index[:, None] + np.arange(access.itemsize // unit)).reshape(-1) if access.itemsize > unit else index

    def _programs(self, access: Access, count: int) -> np.ndarray:
        """Return program index + 1 per unit, or the last program if the whole batch made the access."""
        programs = self._memory.programs[-1:] if access.programs is None else access.programs
        if access.programs is not None and count != len(programs):
            programs = np.repeat(programs, count // len(programs))
        return (programs + 1).astype(np.int32)

    def _check(self, access: Access, index: np.ndarray, programs: np.ndarray) -> None:
        """Report races with earlier accesses."""
        buffer = access.argument.buffer
        last = self._last.get(id(buffer))
        if last is None:
            last = self._last[id(buffer)] = LastAccesses(len(buffer.bytes) // buffer.unit)
        if self._synchronized:
            last.track_times()
        if access.kind == "load":
            self._check_load(access, last, index, programs)
            return
        changed = access.changed
        assert changed is not None
        if len(index) != len(changed):
            changed = np.repeat(changed, len(index) // len(changed))
        if access.kind == "store":
            self._check_store(access, last, index, programs, changed)
        else:
            self._check_atomic(access, last, index, programs, changed)

    def _check_load(self, access: Access, last: LastAccesses, index: np.ndarray, programs: np.ndarray) -> None:
        if access.volatile:
            self._synchronize(access, acquires=True, releases=False)
            return
        self._report_races(access, last, "changer", index, programs, "reads {}, which program {} writes")
        self._report_races(access, last, "updater", index, programs, "reads {}, which program {} updates atomically")
        before = last.reader[index]
        differs = (before != 0) & (before != programs)
        if access.programs is None and len(self._memory.programs) > 1:  # read by the whole batch
            last.set("second_reader", index, self._memory.programs[0] + 1, self._clock)
        elif differs.any():
            at = index[differs]
            last.set("second_reader", at, before[differs], last.time("reader", at))
        last.set("reader", index, programs, self._clock)

    def _check_store(
        self, access: Access, last: LastAccesses, index: np.ndarray, programs: np.ndarray, changed: np.ndarray
    ) -> None:
        last.track_stores()
        if changed.any():
            at, by = index[changed], programs[changed]
            self._report_races(access, last, "writer", at, by, "stores to {}, where program {} stores another value")
            for readers in ("reader", "second_reader"):
                self._report_races(access, last, readers, at, by, "stores to {}, which program {} reads")
            self._report_races(access, last, "updater", at, by, "stores to {}, which program {} updates atomically")
            last.set("changer", at, by, self._clock)
        last.set("writer", index, programs, self._clock)

    def _check_atomic(
        self, access: Access, last: LastAccesses, index: np.ndarray, programs: np.ndarray, changed: np.ndarray
    ) -> None:
        last.track_atomics()
        if access.scope == ir.MEM_SYNC_SCOPE.CTA:
            text = 'updates {} with scope="cta", and program {} updates it too'
            self._report_races(access, last, "updater", index, programs, text)
        elif access.order in ACQUIRE or access.order in RELEASE:
            self._synchronize(access, access.order in ACQUIRE, access.order in RELEASE)
        self._report_races(access, last, "writer", index, programs, "updates {}, which program {} stores to")
        if changed.any():
            at, by = index[changed], programs[changed]
            for readers in ("reader", "second_reader"):
                self._report_races(access, last, readers, at, by, "updates {}, which program {} reads")
            last.set("updater", at, by, self._clock)

    def _report_races(
        self, access: Access, last: LastAccesses, role: str, index: np.ndarray, programs: np.ndarray, text: str
    ) -> None:
        """Report accesses to units last accessed by another program, unless atomics order the two."""
        others = getattr(last, role)
        if others is None:
            return
        argument, buffer = access.argument, access.argument.buffer
        other = others[index]
        racing = np.flatnonzero((other != 0) & (other != programs))
        if len(racing) and self._synchronized:
            times = np.broadcast_to(last.time(role, index[racing]), racing.shape)
            offsets = index[racing] * buffer.unit
            columns = (other[racing], times, programs[racing], offsets)
            pairs = zip(*(column.tolist() for column in columns), strict=True)
            racing = racing[[not self._happens_before(o, t, p, (id(buffer), at)) for o, t, p, at in pairs]]
        if len(racing):
            lane = int(racing[0])
            element = self._element(argument, int(index[lane]))
            race = text.format(argument.describe(element), self._memory.program_id(int(other[lane]) - 1))
            detail = f"{race}, without synchronization"
            self._report(RACE, access, programs[lane], element, len(racing), detail)

    def _synchronize(self, access: Access, acquires: bool, releases: bool) -> None:
        if not self._synchronized:
            for last in self._last.values():
                last.track_times()
        offsets, programs = access.offsets, access.programs
        if programs is None:
            programs = np.repeat(self._memory.programs, len(offsets))
            offsets = np.tile(offsets, len(self._memory.programs))
        for offset, program in zip(offsets.tolist(), programs.tolist(), strict=True):
            self._clock += 1
            address = id(access.argument.buffer), offset
            self._synchronized[address].append((self._clock, program + 1, acquires, releases))
            if acquires:
                self._acquired[program + 1].append((self._clock, address))
        self._clock += 1
        self._visible.clear()

    def _happens_before(self, other: int, time: int, program: int, address: tuple[int, int]) -> bool:
        """Return whether an access of `other` at this time happens before what `program` does now.

        Synchronization at the address in question does not count: another run may order it differently.
        """
        key = program, address if address in self._synchronized else None
        if key not in self._visible:
            self._visible[key] = {}, self._visible_to(*key)
        known, search = self._visible[key]
        while known.get(other, -1) <= time:
            by, released = next(search, (0, 0))
            if not by:
                return False
            known[by] = max(released, known.get(by, -1))
        return True

    def _visible_to(self, program: int, ignored: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
        """Yield the releases that are visible to `program` now, as (program, time), roughly the latest first.

        Accesses before a release are visible to the program that acquires it and, transitively, to those that
        synchronize with that program.
        """
        searched: dict[tuple[int, int], int] = {}  # by address: the number of its atomics yielded so far
        reached: dict[int, int] = {}  # by program: the time up to which its acquires have been followed
        pending = deque([(program, self._clock + 1)])
        while pending:
            acquirer, until = pending.popleft()
            since = reached.get(acquirer, -1)
            if until <= since:
                continue
            reached[acquirer] = until
            for acquired, address in reversed(self._acquired[acquirer]):
                if acquired < since:
                    break
                if acquired >= until or address == ignored:
                    continue
                atomics = self._synchronized[address]
                start, stop = searched.get(address, 0), bisect_left(atomics, (acquired,))
                searched[address] = max(start, stop)
                for released, by, _, releases in reversed(atomics[start:stop]):
                    if releases and by != program:
                        yield by, released
                        pending.append((by, released))

    def _report(self, kind: str, access: Access, program: Any, element: int, lanes: int, detail: str) -> None:
        index = int(program) - 1
        self._findings.append(
            self._memory.finding(kind, access.argument, access.location, index, element, lanes, detail)
        )

    def _element(self, argument: Argument, unit: int) -> int:
        return (unit * argument.buffer.unit - argument.first_byte) // argument.itemsize
