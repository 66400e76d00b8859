"""What a launch has done to memory so far: the traffic of each argument, and who touched which element, for races and
for memory that nothing wrote."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

import numpy as np
from triton._C.libtriton import ir

from tilewright.interpreter.memory import ACQUIRE, RELEASE, Access, Argument, Buffer, Memory
from tilewright.interpreter.results import RACE, READ_BEFORE_WRITE, WARP, Finding, Traffic


class Touched:
    """Per unit of one storage: the programs that touched it last, as their number + 1; 0: none.

    Arrays are made when first needed and are zero, so untouched pages of large storages cost nothing.
    """

    def __init__(self, units: int):
        self._units = units
        self.reader = self._zeros()
        self.other_reader = self._zeros()  # one that differs from `reader`
        self.writer: np.ndarray | None = None
        self.changer: np.ndarray | None = None  # the last that put another value there
        self.updater: np.ndarray | None = None  # by atomics
        self.times: dict[str, np.ndarray] = {}  # of the accesses above, kept once an atomic has ordered anything

    def _zeros(self) -> np.ndarray:
        return np.zeros(self._units, np.int32)

    def open_for_writing(self) -> None:
        if self.writer is None:
            self.writer, self.changer = self._zeros(), self._zeros()

    def open_for_updates(self) -> None:
        if self.updater is None:
            self.updater = self._zeros()

    def keep_time(self) -> None:
        if not self.times:
            self.times = {what: self._zeros() for what in ("reader", "other_reader", "writer", "changer", "updater")}

    def set(self, what: str, index: np.ndarray, who: Any, time: Any) -> None:
        getattr(self, what)[index] = who
        if self.times:
            self.times[what][index] = time

    def time(self, what: str, index: np.ndarray) -> np.ndarray | int:
        return self.times[what][index] if self.times else 0


class Ledger:
    """Takes the accesses of one batch after the other, in the order in which they ran."""

    def __init__(self, memory: Memory, fresh: dict[int, np.ndarray]):
        self._memory = memory
        self._fresh = fresh  # by address of torch.empty's memory: which bytes have been written since
        self._findings: dict[tuple[Any, ...], Finding] = {}
        self._touched: dict[int, Touched] = {}
        self._counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._totals: dict[str, Traffic] = {a.name: Traffic(a.name, a.tensor) for a in memory.arguments}
        self._clock = 0
        # by place in memory: time, program, whether it acquires, whether it releases
        self._synced: dict[tuple[int, int], list[tuple[int, int, bool, bool]]] = defaultdict(list)
        self._acquired: dict[int, list[tuple[int, tuple[int, int]]]] = defaultdict(list)  # by program: time, place
        self._order: dict[tuple[Any, ...], dict[int, int]] = {}  # `_known_to`, until the next synchronisation

    def take(self) -> None:
        """What the memory's batch did."""
        for finding in self._memory.findings:
            self._add(finding)
        for access in self._memory.accesses:
            self._clock += 1
            index = self._units(access)
            who = np.broadcast_to(self._who(access, len(index)), index.shape)
            self._count(access, index, who)
            self._watch(access, index, who)
        self._memory.forget()

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    def traffic(self, maps: bool) -> dict[str, Traffic]:
        """Per argument; with `maps`, also who read and wrote each element."""
        for argument in self._memory.arguments:
            total = self._totals[argument.name]
            if argument.name in self._counts:
                step = argument.size // argument.buffer.unit
                reads, writer = (counts[::step] for counts in self._counts[argument.name])
                total.distinct_read = int(np.count_nonzero(reads)) * argument.size
                total.distinct_written = int(np.count_nonzero(writer)) * argument.size
                if maps:
                    total.reads, total.writer = argument.shaped(reads), argument.shaped(writer)
        return self._totals

    def _add(self, finding: Finding) -> None:
        key = (finding.kind, finding.argument, finding.file, finding.line)
        known = self._findings.get(key)
        if known is not None:
            finding = dataclasses.replace(known, lanes=known.lanes + finding.lanes)
        self._findings[key] = finding

    # traffic

    def _count(self, access: Access, index: np.ndarray, who: np.ndarray) -> None:
        argument, total = access.argument, self._totals[access.argument.name]
        everyone = len(self._memory.numbers) if access.programs is None else 1
        lanes = len(access.where) * everyone
        total.lanes += access.lanes
        total.masked += access.lanes - lanes
        total.sectors += access.sectors * (2 if access.kind == "atomic" else 1)
        moved = lanes * access.size
        if access.kind == "load":
            total.loaded += moved
        elif access.kind == "store":
            total.stored += moved
        else:
            total.atomic += moved
            programs = len(self._memory.numbers)
            total.warps += programs * math.ceil(access.lanes / programs / WARP)
        if argument.name not in self._counts:
            units = argument.span * argument.size // argument.buffer.unit
            self._counts[argument.name] = np.zeros(units, np.uint32), np.zeros(units, np.int32)
        reads, writer = self._counts[argument.name]
        index = index - argument.first // argument.buffer.unit
        if access.kind != "store":
            np.add.at(reads, index, np.uint32(everyone))
        if access.kind != "load":
            writer[index] = who

    def _units(self, access: Access) -> np.ndarray:
        """Which units of the storage; wide accesses cover several."""
        unit = access.argument.buffer.unit
        index: np.ndarray = access.where // unit
        return (index[:, None] + np.arange(access.size // unit)).reshape(-1) if access.size > unit else index

    def _who(self, access: Access, count: int) -> np.ndarray:
        programs = self._memory.numbers[-1:] if access.programs is None else access.programs
        if access.programs is not None and count != len(programs):
            programs = np.repeat(programs, count // len(programs))
        return (programs + 1).astype(np.int32)

    # races and memory that nothing wrote

    def _watch(self, access: Access, index: np.ndarray, who: np.ndarray) -> None:
        if not len(index):
            return
        buffer = access.argument.buffer
        touched = self._touched_of(buffer)
        if access.kind == "load":
            self._watch_load(access, buffer, touched, index, who)
        else:
            changed = access.changed
            assert changed is not None
            if len(index) != len(changed):
                changed = np.repeat(changed, len(index) // len(changed))
            if access.kind == "store":
                self._watch_store(access, buffer, touched, index, who, changed)
            else:
                self._watch_update(access, buffer, touched, index, who, changed)

    def _touched_of(self, buffer: Buffer) -> Touched:
        touched = self._touched.get(id(buffer))
        if touched is None:
            touched = self._touched[id(buffer)] = Touched(len(buffer.bytes) // buffer.unit)
        if self._synced:
            touched.keep_time()
        return touched

    def _watch_load(self, access, buffer, touched, index, who) -> None:
        written = self._fresh.get(buffer.storage.data_ptr())
        if written is not None:
            self._check_written(access, written, index, who)
        if access.volatile:
            self._synchronise(access, acquires=True, releases=False)
            return
        self._check(access, touched, "changer", index, who, "reads what program {} writes")
        self._check(access, touched, "updater", index, who, "reads what program {} updates")
        before = touched.reader[index]
        differs = (before != 0) & (before != who)
        if access.programs is None and len(self._memory.numbers) > 1:  # read by all of the batch
            touched.set("other_reader", index, self._memory.numbers[0] + 1, self._clock)
        elif differs.any():
            at = index[differs]
            touched.set("other_reader", at, before[differs], touched.time("reader", at))
        touched.set("reader", index, who, self._clock)

    def _watch_store(self, access, buffer, touched, index, who, changed) -> None:
        written = self._fresh.get(buffer.storage.data_ptr())
        if written is not None:
            changed = changed | self._mark_written(access, written, index)
        touched.open_for_writing()
        if changed.any():
            at, by = index[changed], who[changed]
            self._check(access, touched, "writer", at, by, "stores another value than program {} did to")
            self._check_readers(access, touched, at, by)
            self._check(access, touched, "updater", at, by, "stores where program {} updates")
            touched.set("changer", at, by, self._clock)
        touched.set("writer", index, who, self._clock)

    def _watch_update(self, access, buffer, touched, index, who, changed) -> None:
        written = self._fresh.get(buffer.storage.data_ptr())
        if written is not None:
            self._check_written(access, written, index, who)
            self._mark_written(access, written, index)
        touched.open_for_updates()
        if access.scope == ir.MEM_SYNC_SCOPE.CTA:
            says = 'updates, with scope="cta", what program {} updates'
            self._check(access, touched, "updater", index, who, says)
        elif access.order in ACQUIRE or access.order in RELEASE:
            self._synchronise(access, access.order in ACQUIRE, access.order in RELEASE)
        self._check(access, touched, "writer", index, who, "updates what program {} stores")
        if changed.any():
            at, by = index[changed], who[changed]
            self._check_readers(access, touched, at, by)
            touched.set("updater", at, by, self._clock)

    def _check_written(self, access: Access, written: np.ndarray, index: np.ndarray, who: np.ndarray) -> None:
        fresh = ~written[index * access.argument.buffer.unit]
        if fresh.any():
            lane = int(np.flatnonzero(fresh)[0])
            argument = access.argument
            element = self._element(argument, int(index[lane]))
            detail = f"{access.kind} of {argument.named(element)}, which nothing has written"
            self._add(self._finding(READ_BEFORE_WRITE, access, int(who[lane]), element, int(fresh.sum()), detail))

    def _mark_written(self, access: Access, written: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Returns which of these were not written before."""
        unit = access.argument.buffer.unit
        fresh = ~written[index * unit]
        for byte in range(unit):
            written[index * unit + byte] = True
        return fresh

    def _check_readers(self, access: Access, touched: Touched, index: np.ndarray, who: np.ndarray) -> None:
        verb = "stores" if access.kind == "store" else "updates"
        for readers in ("reader", "other_reader"):
            self._check(access, touched, readers, index, who, f"{verb} what program {{}} reads")

    def _check(
        self, access: Access, touched: Touched, what: str, index: np.ndarray, who: np.ndarray, says: str
    ) -> None:
        """Report elements that another program touched, unless atomics put the two in order."""
        others = getattr(touched, what)
        if others is None:
            return
        other = others[index]
        suspects = np.flatnonzero((other != 0) & (other != who))
        if len(suspects) and self._synced:
            times = np.broadcast_to(touched.time(what, index[suspects]), suspects.shape)
            places = index[suspects] * access.argument.buffer.unit
            keys = zip(other[suspects].tolist(), times.tolist(), who[suspects].tolist(), places.tolist(), strict=True)
            buffer = access.argument.buffer
            suspects = suspects[[not self._happens_before(o, t, w, p, buffer) for o, t, w, p in keys]]
        if not len(suspects):
            return
        lane = int(suspects[0])
        argument = access.argument
        element = self._element(argument, int(index[lane]))
        theirs = self._memory.program(int(other[lane]) - 1)
        joint = " at" if not says.endswith("to") else ""
        detail = f"it {says.format(theirs)}{joint} {argument.named(element)}, and nothing puts the two in order"
        self._add(self._finding(RACE, access, int(who[lane]), element, len(suspects), detail))

    def _synchronise(self, access: Access, acquires: bool, releases: bool) -> None:
        if not self._synced:
            for known in self._touched.values():
                known.keep_time()
        places, programs = access.where, access.programs
        if programs is None:
            programs = np.repeat(self._memory.numbers, len(places))
            places = np.tile(places, len(self._memory.numbers))
        for where, program in zip(places.tolist(), programs.tolist(), strict=True):
            self._clock += 1
            place = id(access.argument.buffer), where
            self._synced[place].append((self._clock, program + 1, acquires, releases))
            if acquires:
                self._acquired[program + 1].append((self._clock, place))
        self._clock += 1
        self._order.clear()

    def _happens_before(self, other: int, time: int, who: int, where: int, buffer: Buffer) -> bool:
        """Whether what `other` did at a time is known to `who` now, by releases and acquires in between. Those at the
        very place in question prove nothing: another run may take them in another order."""
        place = (id(buffer), where)
        key = who, place if place in self._synced else None
        if key not in self._order:
            self._order[key] = self._known_to(*key)
        return self._order[key].get(other, -1) > time

    def _known_to(self, who: int, without: tuple[int, int] | None) -> dict[int, int]:
        """Up to which time the deeds of each program come before what `who` does now: those before a release that was
        acquired, by `who` or by one whose deeds are known."""
        known: dict[int, int] = {}
        follow = [(who, self._clock + 1)]
        while follow:
            program, until = follow.pop()
            for acquired, place in self._acquired[program]:
                if acquired >= until:
                    break
                for released, by, _, releases in self._synced[place] if place != without else ():
                    if released >= acquired:
                        break
                    if releases and by != who and known.get(by, -1) < released:
                        known[by] = released
                        follow.append((by, released))
        return known

    def _finding(self, kind: str, access: Access, who: int, element: int, lanes: int, detail: str) -> Finding:
        return self._memory.find(kind, access.argument, access.place, who - 1, element, lanes, detail)

    def _element(self, argument: Argument, unit: int) -> int:
        return (unit * argument.buffer.unit - argument.first) // argument.size
