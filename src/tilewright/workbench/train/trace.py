"""Read from a trace of torch.profiler where the time of training steps goes.

On a GPU, the events are kernels, copies and fills; on a CPU, the operators themselves, by self time. A kernel is
classified by its name and the names that enclose its launch on the host. Kernels of a backward pass also have the names
that enclosed the operator of the forward pass, which autograd's sequence numbers connect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.workbench.train.kinds import COMMUNICATION, classify

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_EVENTS = ("cpu_op", "user_annotation", "python_function")
LAUNCHES = ("cuda_runtime", "cuda_driver")
DATA = "tilewright: data"  # the range of waiting for a batch
DATA_RANGES = (DATA, "enumerate(DataLoader)")  # the second is torch's own
Interval = tuple[float, float]


@dataclass(frozen=True)
class StepTimes:
    """Microseconds per step."""

    wall_us: float  # while profiled, which costs the host time
    by_kind: dict[str, float]  # device time; kernels that overlap both count
    busy_us: float  # at least one kernel runs
    wait_us: float  # the host waits for data
    exposed_us: float  # communication runs and nothing else does
    launches: float
    is_gpu: bool
    top: list[tuple[str, str, float]] = field(default_factory=list)  # kind, name and time of the longest

    def wall(self, unprofiled_us: float) -> float:
        """Return the time of a step to compare with: a CPU is slower while profiled, kernels of a GPU are not."""
        return unprofiled_us if self.is_gpu else self.wall_us

    @property
    def device_us(self) -> float:
        return sum(self.by_kind.values())


@dataclass
class _Event:
    name: str
    start: float
    end: float
    args: dict[str, Any]
    is_op: bool
    parent: _Event | None = None
    inner: float = 0.0  # time of its children

    @property
    def names(self) -> tuple[str, ...]:
        """Return its name and the names of the events that enclose it, innermost first."""
        return (self.name, *(self.parent.names if self.parent else ()))


LONGEST = 8  # rows of `top`


def read(trace: dict[str, Any], steps: int, wall_us: float) -> StepTimes:
    """Return the times per step of a trace that covers whole steps, each of which took `wall_us` on the host."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    threads = _nested(e for e in events if e.get("cat") in HOST_EVENTS)
    forward = _forward_names(threads)
    device = [e for e in events if e["cat"] in DEVICE_EVENTS]
    work = _device_work(device, events, threads, forward) if device else _host_work(threads, forward)
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[tuple[str, str], float] = defaultdict(float)
    for kind, name, _, us in work:
        by_kind[kind] += us / steps
        by_name[kind, name] += us / steps
    spans = [span for *_, span, _ in work]
    others = _length(_union(span for kind, _, span, _ in work if kind != COMMUNICATION))
    waits = [(e.start, e.end) for found in threads.values() for e in found if e.name.startswith(DATA_RANGES)]
    busy = _length(_union(spans))
    longest = sorted(by_name.items(), key=lambda row: -row[1])[:LONGEST]
    return StepTimes(
        wall_us=wall_us,
        by_kind=dict(by_kind),
        busy_us=busy / steps,
        wait_us=_length(_union(waits)) / steps,
        exposed_us=(busy - others) / steps,
        launches=len(work) / steps,
        is_gpu=bool(device),
        top=[(kind, name, us) for (kind, name), us in longest],
    )


Work = tuple[str, str, Interval, float]  # kind, name, interval, time of its own


def _nested(events: Iterable[dict[str, Any]]) -> dict[Any, list[_Event]]:
    """Return the events of each thread in the order of their start, each with the event that encloses it."""
    threads: dict[Any, list[_Event]] = defaultdict(list)
    for e in events:
        start = float(e["ts"])
        made = _Event(e["name"], start, start + float(e["dur"]), e.get("args", {}), e["cat"] == "cpu_op")
        threads[e["tid"]].append(made)
    for found in threads.values():
        found.sort(key=lambda e: (e.start, -e.end))
        stack: list[_Event] = []
        for event in found:
            while stack and stack[-1].end <= event.start:
                stack.pop()
            if stack:
                event.parent = stack[-1]
                stack[-1].inner += event.end - event.start
            stack.append(event)
    return threads


def _forward_names(threads: dict[Any, list[_Event]]) -> dict[int, tuple[str, ...]]:
    """Return the names that enclosed the operator of a forward pass, by autograd's sequence number."""
    found: dict[int, tuple[str, ...]] = {}
    for events in threads.values():
        for event in events:
            number = event.args.get("Sequence number", -1)
            if event.is_op and number >= 0 and not event.args.get("Fwd thread id") and event.parent:
                found.setdefault(number, event.parent.names)  # the outermost operator with this number
    return found


def _all_names(event: _Event, forward: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of an event, and of the forward pass whose gradient it computes."""
    at: _Event | None = event
    while at is not None:
        if at.is_op and at.args.get("Fwd thread id") and (more := forward.get(at.args.get("Sequence number", -1))):
            return (*event.names, *more)
        at = at.parent
    return event.names


def _host_work(threads: dict[Any, list[_Event]], forward: dict[int, tuple[str, ...]]) -> list[Work]:
    """Return the operators with the time that they spend themselves."""
    return [
        (
            classify(_all_names(event, forward)),
            event.name,
            (event.start, event.end),
            event.end - event.start - event.inner,
        )
        for events in threads.values()
        for event in events
        if event.is_op
    ]


def _device_work(
    device: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    threads: dict[Any, list[_Event]],
    forward: dict[int, tuple[str, ...]],
) -> list[Work]:
    launches = {e["args"]["correlation"]: e for e in events if e["cat"] in LAUNCHES and "correlation" in e["args"]}
    enclosing = _enclosing(launches, threads)
    found = []
    for e in device:
        start = float(e["ts"])
        host = enclosing.get(e.get("args", {}).get("correlation"))
        names = (e["name"], *(_all_names(host, forward) if host else ()))
        found.append((classify(names), e["name"], (start, start + float(e["dur"])), float(e["dur"])))
    return found


def _enclosing(launches: dict[Any, dict[str, Any]], threads: dict[Any, list[_Event]]) -> dict[Any, _Event]:
    """Return the innermost operator or range around each launch, by correlation id."""
    waiting: dict[Any, list[tuple[float, Any]]] = defaultdict(list)
    for correlation, e in launches.items():
        waiting[e["tid"]].append((float(e["ts"]), correlation))
    found: dict[Any, _Event] = {}
    for tid, starts in waiting.items():
        events, place = threads.get(tid, []), 0
        current: _Event | None = None
        for start, correlation in sorted(starts):
            while place < len(events) and events[place].start <= start:
                current, place = events[place], place + 1
            at = current
            while at is not None and at.end <= start:
                at = at.parent
            if at is not None:
                found[correlation] = at
    return found


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)
