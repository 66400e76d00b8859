"""The best configuration for each case: what an op leaves open is tried, checked and timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from tilewright.runtime.configs import TABLES, Config, ConfigTable, Key
from tilewright.spec import Case, Kernel, Op
from tilewright.timer import Clock, require_working_gpu
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import InProcess, Judge
from tilewright.worker.execute import Executor, KernelFailed, Request
from tilewright.worker.timed_run import InputPool, TimedRun

SAMPLES = 15
GLANCES = 3  # samples of every configuration; the fastest by these are looked at well
FINALISTS = 4  # beside the default
WORTH = 0.99  # of the default's time: what wins by less may win by chance


@dataclass
class Tried:
    config: Config
    us: float | None
    reason: str = ""  # why it has no time


@dataclass
class Search:
    """What was tried for one key, best first."""

    table: ConfigTable
    key: Key
    op: str
    kernel: str
    case: Case
    direction: str
    default: Config
    tried: list[Tried] = field(default_factory=list)

    @property
    def best(self) -> Tried | None:
        return next((one for one in self.tried if one.us is not None), None)

    @property
    def default_us(self) -> float | None:
        return next((one.us for one in self.tried if one.config == self.default), None)

    @property
    def winner(self) -> Config | None:
        """The configuration worth writing down; none where the default is as good."""
        if self.best is None or self.best.us is None:
            return None
        if self.default_us is not None and self.best.us > WORTH * self.default_us:
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
    """One search for each key that the kernels ask for on these cases, each key once."""
    done: set[tuple[str, Key]] = set()
    for case in cases:
        bed = _TestBed(op, case, device, clock, samples)
        for kernel in kernels:
            if not kernel.fits(*op.make(case, "meta")):
                continue
            directions = ("forward", "both") if kernel.differentiable else ("forward",)
            for direction in directions:
                for table, key in bed.asked(kernel, direction):
                    if (table.file, key) in done:
                        continue
                    done.add((table.file, key))
                    on_step(f"{kernel.name} {case} {direction}")
                    yield bed.search(kernel, direction, table, key)


def keep(found: Sequence[Search], gpu: str) -> None:
    """Write the winners down, and forget those that the default beats now. Where nothing was right nothing changes."""
    for table in {id(search.table): search.table for search in found}.values():
        table.save(gpu, {search.key: search.winner for search in found if search.table is table and search.best})


class _TestBed:
    """One case with its inputs and answers, made once."""

    def __init__(self, op: Op, case: Case, device: str, clock: Clock, samples: int):
        self._op, self._device, self._clock, self._samples = op, device, clock, samples
        self._case, self._trial = case, CheckCase(case)
        self._references = ReferenceRuns(op, device, seed=0, evicts_large=False, is_training=True)
        self._inputs: dict[str, InputPool] = {}

    def asked(self, kernel: Kernel, direction: str) -> list[tuple[ConfigTable, Key]]:
        """What the kernel asks for in this direction and, with gradients, not already without."""
        request = self._request(direction)
        found: dict[str, list[tuple[ConfigTable, Key]]] = {}
        for way in ("forward", "both"):
            wanted = request if way == "both" else replace(request, grads=[], needs_grad=[])
            with contextlib.ExitStack() as stack:
                keys = [(table, stack.enter_context(table.recording())) for table in TABLES]
                Executor(self._device).execute(kernel.fn, wanted)
                found[way] = [(table, key) for table, asked in keys for key in asked]
        if direction == "forward":
            return found["forward"]
        return [one for one in found["both"] if one not in found["forward"]]

    def search(self, kernel: Kernel, direction: str, table: ConfigTable, key: Key) -> Search:
        default = table.default(*key)
        search = Search(table, key, self._op.name, kernel.name, self._case, direction, default)
        glances: list[tuple[float, Config]] = []
        for config in [default, *[config for config in table.choices(*key) if config != default]]:
            with table.override(key, config):
                glances.append((self._glance(kernel, direction), config))
        timed = 0
        for us, config in [glances[0], *sorted(glances[1:], key=lambda glance: glance[0])]:
            if timed > FINALISTS:
                search.tried.append(Tried(config, None, f"{us:.1f} us at first sight"))
                continue
            with table.override(key, config):
                search.tried.append(self._try(kernel, direction, config))
            timed += search.tried[-1].us is not None
        search.tried.sort(key=lambda one: one.us if one.us is not None else float("inf"))
        return search

    def _glance(self, kernel: Kernel, direction: str) -> float:
        """Microseconds, roughly; a configuration that does not run is looked at last."""
        try:
            track = TimedRun(kernel.fn, self._inputs_for(direction), direction, self._clock)
            track.sample()
            return min(track.sample().us for _ in range(GLANCES))
        except KernelFailed:
            return float("inf")

    def _try(self, kernel: Kernel, direction: str, config: Config) -> Tried:
        if direction == "forward":
            kernel = replace(kernel, differentiable=False)
        judge = Judge(self._op, kernel, InProcess(kernel.fn, self._device), self._references, self._device)
        verdict = judge.judge([self._trial], lambda: None)
        if self._device == "cuda":
            require_working_gpu(f"{kernel.name} with {config}")
        if verdict.verdict != "right":
            return Tried(config, None, f"{verdict.verdict}: {verdict.reason}")
        try:
            track = TimedRun(kernel.fn, self._inputs_for(direction), direction, self._clock)
            track.warm_up()
            return Tried(config, median(track.sample().us for _ in range(self._samples)))
        except KernelFailed as failure:
            return Tried(config, None, str(failure))

    def _request(self, direction: str) -> Request:
        request = self._references.request(
            self._trial, self._references(self._trial, self._op.backward_cost is not None, 0)
        )
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
        "tried": [{"config": one.config, "us": one.us, "reason": one.reason} for one in search.tried],
    }
