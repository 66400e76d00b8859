"""Measure where the time of a training loop goes: `with tilewright.job() as job`, and `job.step()` after each step."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tilewright.workbench.train.diagnosis import Diagnosis, diagnose
from tilewright.workbench.train.trace import DATA, StepTimes, read

WARMUP, STEPS = 3, 5


class Job:
    """A training loop that is being measured. Printing it after the loop shows the diagnosis."""

    def __init__(self, warmup: int = WARMUP, steps: int = STEPS):
        if warmup < 0 or steps < 1:
            raise ValueError(f"warmup must be at least 0 and steps at least 1, not {warmup} and {steps}")
        self.warmup = warmup
        self.steps = steps
        self.step_us: list[float] = []  # steps that were not profiled, without those of the warm-up
        self.times: StepTimes | None = None
        self._count = 0
        self._profiler: Any = None
        self._start = 0.0
        self._profiled = 0
        self._profiled_us = 0.0

    def __enter__(self) -> Job:
        self._start = _now()
        self._arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Print the diagnosis, unless the loop failed."""
        self.finish()
        if kind is None:
            print(self)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield from a loader, and count the time it takes as data loading. torch's DataLoader is counted anyway."""
        iterator = iter(loader)
        while True:
            with record_function(DATA):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    def step(self) -> None:
        """Mark the end of a training step."""
        self._count += 1
        if self._profiler is not None:
            self._profiled += 1
            if self._profiled == self.steps:
                self.finish()
        else:
            now = _now()
            if self._count > self.warmup:
                self.step_us.append((now - self._start) * 1e6)
            self._start = now
        self._arm()

    def finish(self) -> None:
        """Stop profiling. The rest of the loop is only timed."""
        if self._profiler is None:
            return
        _synchronize()
        self._profiled_us = (_now() - self._start) * 1e6 / max(1, self._profiled)
        self._profiler.stop()
        if self._profiled:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(file))
                self.times = read(json.loads(file.read_text()), self._profiled, self._profiled_us)
        self._profiler = None
        self._start = _now()

    @property
    def wall_us(self) -> float:
        """The median time of a step: of those that were not profiled, if there are any."""
        return statistics.median(self.step_us) if self.step_us else self._profiled_us

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The resource that limits the job; None if no step was profiled."""
        return None if self.times is None else diagnose(self.wall_us, self.times)

    def __str__(self) -> str:
        if self.diagnosis is None:
            why = f"the loop marked {self._count} steps, and the first {self.warmup} are warm-up"
            return f"no step was profiled: {why}. Call job.step() after each step."
        return str(self.diagnosis)

    def _arm(self) -> None:
        """Start the profiler once the warm-up is over."""
        if self._count != self.warmup or self.times is not None or self._profiler is not None:
            return
        if torch.autograd._profiler_enabled():  # torch would end the process
            raise RuntimeError("another profiler is running: end it before tilewright.job(), or leave one of them out")
        _synchronize()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._start = _now()


_END = object()


def job(warmup: int = WARMUP, steps: int = STEPS) -> Job:
    """Measure a training loop: which of compute, memory bandwidth, host, data loading or network limits it.

    Call `job.step()` at the end of each step. After `warmup` steps, `steps` steps are profiled by torch.profiler; all
    others are only timed. At the end of the block the diagnosis is printed; `job.times`, `job.step_us` and
    `job.diagnosis` hold it as objects.
    """
    return Job(warmup, steps)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _now() -> float:
    return time.perf_counter()
