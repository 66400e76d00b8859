"""The multiprocessor of a batch of programs, with its checks: shared memory, barriers and partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from tilewright.interpreter.exceptions import DeviceError, Location, UnsupportedFeature, current_line
from tilewright.interpreter.gluon.names import assigned_name
from tilewright.interpreter.gluon.order import COPY, MMA, STORE, WARPS, Barrier, Event, Partition
from tilewright.interpreter.gluon.schedule import Schedule
from tilewright.interpreter.gluon.shared import Allocation, View, distinct, last_readers, record
from tilewright.interpreter.memory import Memory
from tilewright.interpreter.results import OUT_OF_BOUNDS, RACE, READ_BEFORE_WRITE, Finding

LOAD, TMA_LOAD, COPIED, TMA_STORE, WGMMA = "load", "TMA load", "async_copy", "TMA store", "warpgroup_mma"  # actions
WAITS = {MMA: "warpgroup_mma_wait", STORE: "tma.store_wait(0)"}  # for all operations of a kind


class Machine:
    """The state of a batch; its programs follow the same control flow, so one set of barriers serves them all."""

    def __init__(self, memory: Memory, warps: int):
        self._memory = memory
        self._events: list[Event | None] = [None]  # by number
        self._main = Partition(memory.kernel, warps)
        self._partitions = [self._main]
        self._barriers: list[Barrier] = []
        self._schedule: Schedule | None = None

    @property
    def current(self) -> Partition:
        """The partition that is executing."""
        return self._schedule.current if self._schedule is not None else self._main

    # Shared memory

    def allocate(self, dtype: tl.dtype, shape: list[int]) -> View:
        name = assigned_name("shared memory")
        allocation = Allocation(name, dtype, shape, len(self._memory.programs))
        return View(allocation, dtype, np.arange(allocation.writer.size).reshape(shape), name)

    def load(self, view: View) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the bits that the warps of a partition load, and their poison."""
        self._access(view, self._event(WARPS, LOAD, view), writes=False)
        return view.read()

    def store(self, view: View, bits: np.ndarray, poison: np.ndarray | None) -> None:
        self._access(view, self._event(WARPS, "store", view), writes=True)
        view.write(bits, poison)

    def load_for_store(self, view: View) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the bits that a TMA store loads, and their poison."""
        self._access(view, self._event(STORE, TMA_STORE, view), writes=False)
        return view.read()

    def load_for_mma(self, view: View, event: Event | None) -> tuple[np.ndarray, np.ndarray | None, Event]:
        """Return the bits of an operand of a wgmma, their poison, and the event, which its operands share."""
        event = event or self._event(MMA, WGMMA, view)
        self._access(view, event, writes=False)
        return *view.read(), event

    def copy_into(self, view: View, bits: np.ndarray, poison: np.ndarray | None, barrier: Barrier) -> None:
        """Write what a TMA load copies, and report it to the barrier."""
        barrier.copies += 1
        event = Event(barrier, barrier.copies, self.current, TMA_LOAD, view.name, current_line())
        barrier.last = event
        self._access(view, event, writes=True)
        view.write(bits, poison)
        barrier.copied(view.nbytes)

    def copy_by_warps(self, view: View, bits: np.ndarray, poison: np.ndarray | None) -> None:
        """Write what a cp.async copies; it belongs to the group that the next commit closes."""
        partition = self.current
        owner, time = (partition, COPY), partition.issued[COPY] + 1
        partition.open_copies += 1
        event = Event(owner, time, partition, COPIED, view.name, current_line())
        self._access(view, event, writes=True)
        view.write(bits, poison)

    def commit_copies(self) -> None:
        self.current.tick(COPY)
        self.current.open_copies = 0

    def _event(self, kind: str, action: str, view: View) -> Event:
        partition = self.current
        event = Event((partition, kind), partition.tick(kind), partition, action, view.name, current_line())
        partition.last[kind] = event
        return event

    def _access(self, view: View, event: Event, writes: bool) -> None:
        """Check an access against the last ones to the same elements, and remember it."""
        self._check_inside(view)
        allocation, units = view.allocation, view.units
        numbers = allocation.writer[units]
        for number in distinct(numbers):
            if number:
                self._check_after_write(view, event, number, numbers, writes)
        if writes:
            for number, table in last_readers(allocation, units):
                if number and not self._event_at(number).happened_before(event.partition):
                    self._report_race(view, event, number, table)
        else:
            self._check_form(view)
            unwritten = ~allocation.is_written[units]
            if unwritten.any():
                self._report(READ_BEFORE_WRITE, view, event, unwritten, "which has not been written")
        self._events.append(event)
        record(allocation, units, event, len(self._events) - 1, writes)
        if writes:
            allocation.forms.setdefault(view.form, np.zeros(allocation.writer.size, bool))
            for form, table in allocation.forms.items():
                table[units] = form == view.form

    def _check_after_write(self, view: View, event: Event, number: int, numbers: np.ndarray, writes: bool) -> None:
        written = self._event_at(number)
        if not written.happened_before(event.partition):
            self._report_race(view, event, number, numbers)
        elif not writes and event.is_asynchronous and written.is_by_warps and not written.is_fenced(event.partition):
            detail = f"stored in {_line(written, event.location)} without fence_async_shared in between"
            self._report(RACE, view, event, numbers == number, detail)

    def _check_form(self, view: View) -> None:
        """Refuse to load data that was stored through a view with other offsets: physical layouts are not computed."""
        for form, table in view.allocation.forms.items():
            if form != view.form and table[view.units].any():
                raise UnsupportedFeature("a load through _reinterpret of data stored with another type or layout")

    def _event_at(self, number: int) -> Event:
        event = self._events[number]
        assert event is not None
        return event

    # Barriers

    def barrier(self, view: View) -> Barrier:
        self._check_inside(view)
        unit = int(view.units[0])
        if unit not in view.allocation.barriers:
            raise DeviceError(f"`{view.name}` is used as an mbarrier before mbarrier.init")
        return view.allocation.barriers[unit]

    def init_barrier(self, view: View, count: int) -> None:
        if not 1 <= count < 2**20:
            raise DeviceError(f"the count of an mbarrier is 1 to {2**20 - 1}, not {count}")
        barrier = Barrier(view.name, count)
        view.allocation.barriers[int(view.units[0])] = barrier
        self._barriers.append(barrier)

    def invalidate_barrier(self, view: View) -> None:
        self.barrier(view)
        del view.allocation.barriers[int(view.units[0])]

    def arrive(self, view: View, count: int, nbytes: int = 0) -> None:
        barrier = self.barrier(view)
        if count > barrier.pending:
            raise DeviceError(f"{count} more arrivals at `{view.name}`, which expects {barrier.pending} in this phase")
        barrier.bytes += nbytes
        barrier.arrive(self.current, count)

    def wait(self, view: View, parity: int) -> None:
        barrier = self.barrier(view)
        if not barrier.has_completed(parity):
            schedule = self._schedule or Schedule([self.current], [])
            schedule.wait(barrier, parity, self._memory.program_id(int(self._memory.programs[0])))
        self.current.learn(barrier)

    # Partitions

    def specialize(self, bodies: list[Callable[[], Any]], names: list[str], warps: list[int]) -> Any:
        """Run the default partition and the workers, and return the result of the default partition."""
        if self._schedule is not None:
            raise DeviceError("warp_specialize cannot be called within a partition")
        workers = [Partition(name, count) for name, count in zip(names[1:], warps, strict=True)]
        for worker in workers:
            worker.learn(self._main)
        self._partitions += workers
        name, self._main.name = self._main.name, names[0]
        self._schedule = Schedule([self._main, *workers], bodies)
        try:
            result = self._schedule.run()
        finally:
            self._schedule = None
            self._main.name = name
        for worker in workers:
            self._main.learn(worker)
        return result

    def finish(self) -> None:
        """Report what is in flight when the programs end."""
        for partition in self._partitions:
            for kind, remedy in WAITS.items():
                if partition.clock.get((partition, kind), 0) < partition.issued[kind]:
                    self._report_end(partition.last[kind], remedy)
        for barrier in self._barriers:
            if barrier.last is not None and self._main.clock.get(barrier, 0) < barrier.copies:
                self._report_end(barrier.last, f"mbarrier.wait on `{barrier.name}`")

    def _report_end(self, event: Event, remedy: str) -> None:
        detail = f"{event.action} of `{event.name}` is in flight when the program ends, without {remedy}"
        self._add(RACE, event.name, event.location, (), 1, detail)

    # Findings

    def _check_inside(self, view: View) -> None:
        if view.outside:
            self._add(OUT_OF_BOUNDS, view.allocation.name, current_line(), (), 1, view.outside)

    def check_accumulator(self, event: Event) -> None:
        """Report a use of the result of a wgmma that may be in flight."""
        if not event.happened_before(self.current):
            where = current_line()
            detail = f"the result of the warpgroup_mma in {_line(event, where)} is used in flight: {event.remedy}"
            self._add(RACE, "accumulator", where, (), 1, detail)

    def _report_race(self, view: View, event: Event, number: int, numbers: np.ndarray) -> None:
        other = self._event_at(number)
        whose = f" of `{other.partition.name}`" if other.partition is not event.partition else ""
        detail = f"races with the {other.action} in {_line(other, event.location)}{whose}: {other.remedy}"
        self._report(RACE, view, event, numbers == number, detail)

    def _report(self, kind: str, view: View, event: Event, bad: np.ndarray, detail: str) -> None:
        element = view.element(int(np.flatnonzero(bad)[0]))
        what = f"{event.action} of `{view.name}[{', '.join(map(str, element))}]`"
        comma = ", " if detail.startswith(("which", "stored")) else " "
        self._add(kind, view.allocation.name, event.location, element, int(bad.sum()), what + comma + detail)

    def _add(self, kind: str, name: str, location: Location, element: tuple[int, ...], lanes: int, detail: str) -> None:
        memory = self._memory
        program, lanes = memory.program_id(int(memory.programs[0])), lanes * len(memory.programs)
        memory.findings.append(Finding(kind, memory.kernel, name, *location, program, element, lanes, detail))


def _line(event: Event, here: Location) -> str:
    file, line = event.location
    return f"line {line}" if file == here[0] else f"{file}:{line}"
