"""Partitions of a warp-specialised kernel as coroutines: one runs at a time, until it waits for a barrier.

A partition is a thread, since a kernel's functions are plain Python functions that cannot yield; the threads take turns
in a fixed order, so that a run repeats exactly. If every partition waits, none will ever run again: a deadlock.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.interpreter.exceptions import LaunchError, Location, current_line
from tilewright.interpreter.gluon.order import Barrier, Partition


class Deadlock(LaunchError):
    """Every partition that has not returned waits for a barrier."""

    kind = "timeout"


class _Cancelled(BaseException):
    """Ends the thread of a partition that will not continue."""


@dataclass(frozen=True)
class Waiting:
    """A wait for the phase of a barrier with this parity."""

    barrier: Barrier
    parity: int
    location: Location

    @property
    def is_over(self) -> bool:
        return self.barrier.has_completed(self.parity)

    def describe(self, partition: Partition, first: Location) -> str:
        file, line = self.location
        where = f"line {line}" if file == first[0] else f"{file}:{line}"
        phase = f"phase {self.parity} of `{self.barrier.name}` ({self.barrier.state()})"
        return f"`{partition.name}` waits in {where} for {phase}"


class Turn:
    """A partition's thread, which runs only between `step` and the next `pause`."""

    def __init__(self, partition: Partition, body: Callable[[], Any]):
        self.partition = partition
        self.waiting: Waiting | None = None
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._body = body
        self._is_cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()  # NumPy's error state is part of it
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_cancelled:
                self.result = self._body()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._back.release()

    def step(self) -> None:
        """Run until the partition waits or returns."""
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        if not self.is_done:
            self._is_cancelled = True
            self.step()
        self._thread.join()


class Schedule:
    """The partitions that run at the same time; the first is the default partition."""

    def __init__(self, partitions: list[Partition], bodies: list[Callable[[], Any]]):
        self.current = partitions[0]
        self._partitions = partitions
        self._bodies = bodies
        self._turns: list[Turn] = []

    def run(self) -> Any:
        self._turns = [Turn(p, body) for p, body in zip(self._partitions, self._bodies, strict=True)]
        try:
            while not all(turn.is_done for turn in self._turns):
                self._round()
        finally:
            for turn in self._turns:
                turn.cancel()
        return self._turns[0].result

    def _round(self) -> None:
        """Give every partition that can continue a turn."""
        ready = [t for t in self._turns if not t.is_done and (t.waiting is None or t.waiting.is_over)]
        for turn in ready:
            turn.waiting = None
            self.current = turn.partition
            turn.step()
            if turn.error is not None:
                raise turn.error
        if not ready:
            self._raise_deadlock([(t.partition, t.waiting) for t in self._turns if t.waiting is not None])

    def wait(self, barrier: Barrier, parity: int, program: tuple[int, int, int]) -> None:
        """Let other partitions run until the phase of a barrier completes."""
        waiting = Waiting(barrier, parity, current_line())
        self._program = program
        turn = next((t for t in self._turns if t.partition is self.current), None)
        if turn is None:
            self._raise_deadlock([(self.current, waiting)])
            return
        turn.waiting = waiting
        turn.pause()

    def _raise_deadlock(self, waits: list[tuple[Partition, Waiting]]) -> None:
        first = waits[0][1].location
        texts = [waiting.describe(partition, first) for partition, waiting in waits]
        waiting = {id(partition) for partition, _ in waits}
        texts += [f"`{p.name}` has returned" for p in self._partitions if id(p) not in waiting]
        raise Deadlock(f"{first[0]}:{first[1]}: deadlock in program {self._program}: {'; '.join(texts)}")
