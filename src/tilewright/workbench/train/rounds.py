"""Time the variants of a training step in rounds, in random order, each in its own process."""

from __future__ import annotations

import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilewright.workbench.bench.intervals import of_median, of_ratio
from tilewright.workbench.train import child
from tilewright.workbench.train.child import Memory
from tilewright.workbench.train.trace import StepTimes
from tilewright.workbench.train.workloads import Workload

BASELINE = "eager"
PRELOADED = "tilewright.workbench.train.child"  # imported once for all processes
TIMEOUT_S = 900.0  # for one request; the first one compiles


@dataclass
class Options:
    device: str
    rounds: int = 5
    steps: int = 5  # per round and variant
    warmup: int = 3
    profiled: int = 3
    seed: int = 0


@dataclass
class Measurement:
    """One variant: its samples, memory and breakdown, or why it has none."""

    variant: str
    reason: str = ""
    samples_us: list[float] = field(default_factory=list)
    memory: Memory | None = None
    times: StepTimes | None = None
    dtype: str = ""
    units: int = 0  # tokens or samples per step
    unit: str = "tokens"
    against: dict[str, Any] | None = None  # the ratio of the baseline's time to this one, with its interval

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def interval_us(self) -> tuple[float, float]:
        return of_median(self.samples_us)

    @property
    def rate(self) -> float:
        """Tokens or samples per second."""
        return self.units / self.median_us * 1e6


class _Child:
    """A variant's process."""

    def __init__(self, work: Workload, variant: str, options: Options):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED, *(() if work.is_own else ("transformers",))])
        self.connection, theirs = context.Pipe()
        args = (theirs, work, variant, options.device, options.warmup)
        self.process = context.Process(target=child.serve, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        """Return (done, result) or (failed, reason)."""
        if not self.connection.poll(TIMEOUT_S):
            return "failed", f"no answer in {TIMEOUT_S:.0f} s"
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join(10)
            return "failed", f"its process ended with exit code {self.process.exitcode}"

    def ask(self, method: str, *args: Any) -> tuple[str, Any]:
        try:
            self.connection.send((method, args))
        except OSError:
            return "failed", f"its process ended with exit code {self.process.exitcode}"
        return self.receive()

    def close(self) -> None:
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _children(
    work: Workload,
    variants: Sequence[str],
    options: Options,
    found: dict[str, Measurement],
    on_step: Callable[[str], None],
) -> Iterator[dict[str, _Child]]:
    """Start the variants one after another, and yield those that train; the others have a reason."""
    running: dict[str, _Child] = {}
    try:
        for variant in variants:
            on_step(f"{variant}, warm-up")
            started = running[variant] = _Child(work, variant, options)
            status, result = started.receive()
            if status == "failed":
                found[variant].reason = result
                running.pop(variant).close()
            else:
                one = found[variant]
                one.dtype, one.units, one.unit = result["dtype"], result["units"], result["unit"]
        yield running
    finally:
        for one in running.values():
            one.close()


def measure(
    work: Workload, variants: Sequence[str], options: Options, on_step: Callable[[str], None] = lambda _: None
) -> list[Measurement]:
    """Measure every variant. In each round they take their steps in a new random order."""
    found = {variant: Measurement(variant) for variant in variants}
    shuffle = random.Random(options.seed)
    with _children(work, variants, options, found, on_step) as running:
        for number in range(options.rounds):
            for variant in shuffle.sample([*running], len(running)):
                on_step(f"{variant}, round {number + 1} of {options.rounds}")
                result = _ask(running, found, variant, "steps", options.steps)
                found[variant].samples_us += result or []
        for variant in [*running]:
            on_step(f"{variant}, memory and breakdown")
            memory = _ask(running, found, variant, "memory")
            times = _ask(running, found, variant, "profile", options.profiled) if memory else None
            if memory and times:
                found[variant].memory, found[variant].times = Memory(**memory), StepTimes(**times)
    _compare(found)
    return [*found.values()]


def _ask(running: dict[str, _Child], found: dict[str, Measurement], variant: str, method: str, *args: Any) -> Any:
    """Return the result of a request; a variant that fails has a reason from then on, and no samples."""
    status, result = running[variant].ask(method, *args)
    if status == "done":
        return result
    running.pop(variant).close()
    found[variant].reason, found[variant].samples_us = result, []
    return None


def _compare(found: dict[str, Measurement]) -> None:
    baseline = found.get(BASELINE)
    for one in found.values():
        if baseline is not None and one is not baseline and baseline.samples_us and one.samples_us:
            ratio, low, high = of_ratio(baseline.samples_us, one.samples_us, paired=True)
            one.against = {"kernel": BASELINE, "ratio": ratio, "interval": [low, high]}
