"""The order of accesses to shared memory: vector clocks of the partitions and of the asynchronous operations.

An access has a time on the clock of whoever makes it. Warps of a partition access memory in program order; a TMA copy,
a wgmma or a cp.async makes its accesses at some time between its issue and the wait for it, so each has a clock of its
own, of which a partition learns when it waits. An mbarrier passes on what those that arrive know to those that wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tilewright.interpreter.exceptions import Location

WARPS, MMA, STORE, COPY = "warps", "mma", "store", "copy"  # whose accesses: those of warps, wgmma, TMA stores, cp.async

# How a later access has to wait for an earlier one.
REMEDY = {
    WARPS: "an mbarrier has to order the partitions",
    MMA: "wait for it with warpgroup_mma_wait",
    STORE: "wait for it with tma.store_wait",
    COPY: "wait for it with async_copy.wait_group",
}
WAIT_FOR_BARRIER = "wait for the mbarrier of the copy"


class Clock(dict[Hashable, int]):
    """The latest time that is known of each clock."""

    def join(self, other: Clock) -> None:
        for key, time in other.items():
            if self.get(key, 0) < time:
                self[key] = time


@dataclass(eq=False)
class Partition:
    """The warps that execute one function, and what they know."""

    name: str
    warps: int
    clock: Clock = field(default_factory=Clock)
    fenced: Clock = field(default_factory=Clock)  # the writes of warps that asynchronous operations see
    issued: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # operations, by kind
    open_copies: int = 0  # cp.async issued since the last commit
    last: dict[str, Event] = field(default_factory=dict)  # the last operation of each kind

    def tick(self, kind: str) -> int:
        """Return the time of a new operation of this kind; the warps know at once of what they do themselves."""
        self.issued[kind] += 1
        if kind == WARPS:
            self.clock[self, WARPS] = self.issued[WARPS]
        return self.issued[kind]

    def wait(self, kind: str, outstanding: int = 0) -> None:
        """Learn that all but the last operations of a kind have finished."""
        time = max(self.clock.get((self, kind), 0), self.issued[kind] - outstanding)
        self.clock[self, kind] = time

    def fence(self) -> None:
        self.fenced.join(self.clock)

    def learn(self, other: Any) -> None:
        """Learn what another partition knows, or what was known when a barrier completed its phase."""
        self.clock.join(other.clock)
        self.fenced.join(other.fenced)


@dataclass(frozen=True, eq=False)
class Event:
    """One operation's access to shared memory."""

    owner: Hashable  # whose clock it is: a partition with the kind of operation, or the barrier of a TMA load
    time: int
    partition: Partition
    action: str  # a noun: "load", "TMA load"
    name: str  # the buffer
    location: Location

    @property
    def is_by_warps(self) -> bool:
        return isinstance(self.owner, tuple) and self.owner[1] == WARPS

    @property
    def is_asynchronous(self) -> bool:
        """Return whether it accesses memory through the asynchronous proxy."""
        return not isinstance(self.owner, tuple) or self.owner[1] in (MMA, STORE)

    @property
    def remedy(self) -> str:
        return REMEDY[self.owner[1]] if isinstance(self.owner, tuple) else WAIT_FOR_BARRIER

    def happened_before(self, partition: Partition) -> bool:
        """Return whether it has finished before what the partition does now."""
        return partition.clock.get(self.owner, 0) >= self.time

    def is_fenced(self, partition: Partition) -> bool:
        return partition.fenced.get(self.owner, 0) >= self.time


@dataclass(eq=False)
class Barrier:
    """An mbarrier."""

    name: str
    count: int  # arrivals per phase
    pending: int = 0  # arrivals that the current phase lacks
    bytes: int = 0  # announced by `expect` and not yet copied
    phases: int = 0  # completed
    copies: int = 0  # TMA loads that report to it
    clock: Clock = field(default_factory=Clock)  # what is known to those that have waited for the last phase
    fenced: Clock = field(default_factory=Clock)
    _arrived: list[tuple[Clock, Clock]] = field(default_factory=list)
    last: Event | None = None  # the last TMA load

    def __post_init__(self) -> None:
        self.pending = self.count

    def has_completed(self, parity: int) -> bool:
        return self.phases & 1 != parity

    def arrive(self, partition: Partition, count: int) -> None:
        self._arrived.append((Clock(partition.clock), Clock(partition.fenced)))
        self.pending -= count
        self._advance()

    def copied(self, nbytes: int) -> None:
        """Count the bytes of a TMA load that has finished."""
        self.bytes -= nbytes
        self._arrived.append((Clock({self: self.copies}), Clock()))
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count
            for clock, fenced in self._arrived:
                self.clock.join(clock)
                self.fenced.join(fenced)
            self._arrived.clear()

    def state(self) -> str:
        """Describe what the current phase lacks."""
        lacks = []
        if self.pending:
            lacks.append(f"{self.pending} of {self.count} arrivals")
        if self.bytes > 0:
            lacks.append(f"{self.bytes} bytes")
        text = f"{self.phases} phases completed, {' and '.join(lacks) or 'nothing'} missing"
        return text if self.bytes >= 0 else f"{text}, {-self.bytes} bytes copied that no `expect` announced"
