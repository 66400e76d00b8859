"""Search the fastest configuration for each case: every choice of a config table is checked and timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from tilewright.runtime.configs import TABLES, Config, ConfigTable, Key
from tilewright.spec import Case, Kernel, Op
from tilewright.timer import Clock, require_working_gpu
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import InProcess, Judge
from tilewright.worker.execute import Executor, KernelFailed, Request
from tilewright.worker.timed_run import InputPool, TimedRun

SAMPLES = 15
QUICK_SAMPLES = 3  # per configuration, to select the finalists
FINALISTS = 4  # besides the default
BETTER = 0.99  # time / time of the default; smaller gains may be noise


@dataclass
class Attempt:
    config: Config
    us: float | None
    reason: str = ""  # why it has no time


@dataclass
class Search:
    """The attempts for one key, fastest first."""

    table: ConfigTable
    key: Key
    op: str
    kernel: str
    case: Case
    direction: str
    default: Config
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def best(self) -> Attempt | None:
        return next((one for one in self.attempts if one.us is not None), None)

    @property
    def default_us(self) -> float | None:
        return next((one.us for one in self.attempts if one.config == self.default), None)

    @property
    def winner(self) -> Config | None:
        """The configuration to save; None if the default is as good."""
        if self.best is None or self.best.us is None:
            return None
        if self.default_us is not None and self.best.us > BETTER * self.default_us:
            return None
        return self.best.config


def tune(
    op: Op,
    kernels: Sequence[Kernel],
    cases: Sequence[Case],
    *,
    clock: Clock,
    device: str = "cuda",
    samples: int = SAMPLES,
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Search]:
    """Yield one search for each distinct config key that the kernels look up on these cases."""
    done: set[tuple[str, Key]] = set()
    for case in cases:
        tuner = _CaseTuner(op, case, device, clock, samples)
        for kernel in kernels:
            if not kernel.fits(*op.make(case, "meta")):
                continue
            directions = ("forward", "both") if kernel.differentiable else ("forward",)
            for direction in directions:
                for table, key in tuner.keys(kernel, direction):
                    if (table.file, key) in done:
                        continue
                    done.add((table.file, key))
                    on_step(f"{kernel.name} {case} {direction}")
                    yield tuner.search(kernel, direction, table, key)


def save(found: Sequence[Search], gpu: str) -> None:
    """Save the winners, and delete saved ones that the default beats. Searches without a time change nothing."""
    for table in {id(search.table): search.table for search in found}.values():
        table.save(gpu, {search.key: search.winner for search in found if search.table is table and search.best})


class _CaseTuner:
    """Search configurations on one case, with inputs and references made once."""

    def __init__(self, op: Op, case: Case, device: str, clock: Clock, samples: int):
        self._op, self._device, self._clock, self._samples = op, device, clock, samples
        self._index = torch.cuda.current_device() if device == "cuda" else -1
        self._case, self._check_case = case, CheckCase(case)
        self._references = ReferenceRuns(op, device, seed=0, evicts_large=False, is_training=True)
        self._inputs: dict[str, InputPool] = {}

    def keys(self, kernel: Kernel, direction: str) -> list[tuple[ConfigTable, Key]]:
        """Return the config keys that the kernel looks up; for `both`, only those of the backward pass."""
        request = self._request(direction)
        found: dict[str, list[tuple[ConfigTable, Key]]] = {}
        for one in ("forward", "both"):
            wanted = request if one == "both" else replace(request, grads=[], needs_grad=[])
            with contextlib.ExitStack() as stack:
                recorded = [(table, stack.enter_context(table.recording())) for table in TABLES]
                Executor(self._device).execute(kernel.fn, wanted)
                found[one] = [(table, key) for table, keys in recorded for key in keys]
        if direction == "forward":
            return found["forward"]
        return [one for one in found["both"] if one not in found["forward"]]

    def search(self, kernel: Kernel, direction: str, table: ConfigTable, key: Key) -> Search:
        default = table.default_on(self._index, key)
        search = Search(table, key, self._op.name, kernel.name, self._case, direction, default)
        quick: list[tuple[float, Config]] = []
        for config in [default, *[config for config in table.choices_on(self._index, key) if config != default]]:
            with table.override(key, config):
                quick.append((self._quick_us(kernel, direction), config))
        timed = 0
        for us, config in [quick[0], *sorted(quick[1:], key=lambda pair: pair[0])]:
            if timed > FINALISTS:
                search.attempts.append(Attempt(config, None, f"{us:.1f} us in {QUICK_SAMPLES} samples"))
                continue
            with table.override(key, config):
                search.attempts.append(self._attempt(kernel, direction, config))
            timed += search.attempts[-1].us is not None
        search.attempts.sort(key=lambda one: one.us if one.us is not None else float("inf"))
        return search

    def _quick_us(self, kernel: Kernel, direction: str) -> float:
        """Return a rough time; infinity for a configuration that does not run."""
        try:
            run = TimedRun(kernel.fn, self._inputs_for(direction), direction, self._clock)
            run.sample()
            return min(run.sample().us for _ in range(QUICK_SAMPLES))
        except KernelFailed:
            return float("inf")

    def _attempt(self, kernel: Kernel, direction: str, config: Config) -> Attempt:
        if direction == "forward":
            kernel = replace(kernel, differentiable=False)
        judge = Judge(self._op, kernel, InProcess(kernel.fn, self._device), self._references, self._device)
        verdict = judge.judge([self._check_case], lambda: None)
        if self._device == "cuda":
            require_working_gpu(f"{kernel.name} with {config}")
        if verdict.verdict != "right":
            return Attempt(config, None, f"{verdict.verdict}: {verdict.reason}")
        try:
            run = TimedRun(kernel.fn, self._inputs_for(direction), direction, self._clock)
            run.warm_up()
            return Attempt(config, median(run.sample().us for _ in range(self._samples)))
        except KernelFailed as failure:
            return Attempt(config, None, str(failure))

    def _request(self, direction: str) -> Request:
        reference = self._references(self._check_case, self._op.backward_cost is not None, 0)
        request = self._references.request(self._check_case, reference)
        return request if direction == "both" else replace(request, grads=[], needs_grad=[])

    def _inputs_for(self, direction: str) -> InputPool:
        if direction not in self._inputs:
            self._inputs[direction] = InputPool([self._request(direction)], self._device)
        return self._inputs[direction]


def as_json(search: Search, gpu: str) -> dict[str, Any]:
    return {
        "op": search.op,
        "kernel": search.kernel,
        "gpu": gpu,
        "key": list(search.key),
        "case": dict(search.case.point),
        "direction": search.direction,
        "default_us": search.default_us,
        "winner": search.winner,
        "tried": [{"config": one.config, "us": one.us, "reason": one.reason} for one in search.attempts],
    }
