"""Evolve a kernel: let a program write one, judge it, show the program the best ones and the verdict, and repeat.

Every attempt is a line in `attempts.jsonl` of the run's folder, with its kernel beside it, so that a run that was
interrupted continues where it ended.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from tilewright.agents import prompt
from tilewright.agents.answers import ProblemText
from tilewright.agents.generator import generate
from tilewright.agents.prompt import KnownKernel
from tilewright.errors import CannotWrite, GeneratorFails, RunOfAnotherProblem
from tilewright.record import append, read, stamp

LOG = "attempts.jsonl"
BEST = "best.py"
CONTEXT = 2  # best kernels in the prompt
FAST = (0.0, 1.0, 1.5, 2.0)  # p of fast_p: right, and more than p times faster than eager
FRUITLESS = 3  # consecutive rounds without a kernel that end a run
NO_KERNEL, REFUSED, RANKED = "no kernel", "refused", "ranked"


@dataclass(frozen=True)
class Judged:
    """The verdict on one kernel."""

    is_right: bool
    is_ranked: bool
    reason: str = ""  # one line, if it is not ranked
    evidence: str = ""  # several lines, for the next prompt
    submission: int | None = None
    us: float | None = None  # geometric mean over the cases
    share: float | None = None  # its part of the ceiling
    over_eager: float | None = None


class Arbiter(Protocol):
    """Judges kernels for one problem, and knows the best ones."""

    problem: ProblemText

    def judge(self, code: str, derived_from: int | None) -> Judged: ...
    def best(self, count: int) -> list[KnownKernel]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Attempt:
    number: int
    outcome: str  # no kernel, refused or ranked
    is_right: bool = False
    reason: str = ""
    submission: int | None = None
    us: float | None = None
    share: float | None = None
    over_eager: float | None = None
    generate_s: float = 0.0
    judge_s: float = 0.0
    prompt_chars: int = 0
    code_chars: int = 0

    def line(self) -> str:
        """Return the attempt in one line."""
        if self.outcome != RANKED:
            return f"{self.number:4}  {self.outcome}: {self.reason}"
        figures = [f"{self.us:.2f} us"] if self.us is not None else []
        figures += [f"{self.share:.0%} of the ceiling"] if self.share is not None else []
        figures += [f"{self.over_eager:.2f}x eager"] if self.over_eager is not None else []
        return f"{self.number:4}  {self.outcome}: {', '.join(figures)}"


@dataclass(frozen=True)
class Report:
    """The outcome and the cost of a run, with the attempts of earlier runs in the same folder."""

    problem: str
    attempts: int
    kernels: int
    right: int
    ranked: int
    fast: Mapping[str, float | None]  # share of the attempts; None if no time of eager is known
    best: Attempt | None
    generate_s: float
    judge_s: float
    prompt_chars: int
    code_chars: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(problem: str, attempts: Sequence[Attempt]) -> Report:
    """Return the report of some attempts.

    `fast_p` is the share of all attempts that are right and more than p times faster than eager, as in KernelBench.
    """
    ranked = [one for one in attempts if one.us is not None]
    has_speeds = any(one.over_eager is not None for one in ranked)
    right = sum(one.is_right for one in attempts)

    def share(p: float) -> float | None:
        if not attempts or (p and not has_speeds):
            return None
        fast = sum((one.over_eager or 0.0) > p for one in ranked) if p else right
        return fast / len(attempts)

    return Report(
        problem=problem,
        attempts=len(attempts),
        kernels=sum(one.outcome != NO_KERNEL for one in attempts),
        right=right,
        ranked=len(ranked),
        fast={f"fast_{p:g}": share(p) for p in FAST},
        best=min(ranked, key=lambda one: one.us or 0.0, default=None),
        generate_s=round(sum(one.generate_s for one in attempts), 1),
        judge_s=round(sum(one.judge_s for one in attempts), 1),
        prompt_chars=sum(one.prompt_chars for one in attempts),
        code_chars=sum(one.code_chars for one in attempts),
    )


class Run:
    """One run: at most `rounds` attempts in its folder, `jobs` at a time, started within `budget` seconds."""

    def __init__(
        self,
        arbiter: Arbiter,
        command: list[str],
        folder: Path,
        *,
        rounds: int,
        budget: float,
        jobs: int = 1,
        seconds: float = 300.0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._arbiter, self._command, self._folder = arbiter, command, folder
        self._rounds, self._budget, self._jobs, self._seconds, self._say = rounds, budget, jobs, seconds, say
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._deadline = 0.0
        self.attempts = _read_attempts(folder / LOG, arbiter.problem.name)
        self._taken = len(self.attempts)
        self._last: KnownKernel | None = None
        self._fruitless = 0

    def __call__(self) -> Report:
        """Run until the rounds or the budget are used, and return the report."""
        self._deadline = time.monotonic() + self._budget
        workers: list[Any] = []
        try:
            with ThreadPoolExecutor(self._jobs) as pool:
                workers = [pool.submit(self._work) for _ in range(self._jobs)]
                try:
                    for worker in workers:
                        worker.result()
                except BaseException:  # an error, or Ctrl-C: the other workers end too
                    self._stopped.set()
                    self._arbiter.close()
                    raise
        finally:
            self._arbiter.close()
        return summarize(self._arbiter.problem.name, self.attempts)

    def _work(self) -> None:
        while (number := self._take()) is not None:
            self._add(*self._attempt(number))

    def _take(self) -> int | None:
        """Return the number of the next attempt; None if the run is over."""
        with self._lock:
            if self._stopped.is_set() or self._taken >= self._rounds or time.monotonic() >= self._deadline:
                return None
            self._taken += 1
            return self._taken

    def _attempt(self, number: int) -> tuple[Attempt, KnownKernel | None]:
        with self._lock:
            text = prompt.build(self._arbiter.problem, self._arbiter.best(CONTEXT), self._last)
            best = summarize("", self.attempts).best
        seconds = min(self._seconds, max(1.0, self._deadline - time.monotonic()))
        made = generate(self._command, text, seconds, self._stopped.is_set)
        cost: dict[str, Any] = {"generate_s": round(made.seconds, 2), "prompt_chars": len(text)}
        if not made.code:
            return Attempt(number, NO_KERNEL, reason=made.error, **cost), None
        self._save(f"{number:04}.py", made.code)
        began = time.monotonic()
        verdict = self._arbiter.judge(made.code, best.submission if best else None)
        cost |= {"judge_s": round(time.monotonic() - began, 2), "code_chars": len(made.code)}
        known = ("is_right", "reason", "submission", "us", "share", "over_eager")
        outcome = RANKED if verdict.is_ranked else REFUSED
        attempt = Attempt(number, outcome, **{name: getattr(verdict, name) for name in known}, **cost)
        results = f"{attempt.line().split(maxsplit=1)[1]}\n{verdict.evidence}".strip()
        return attempt, KnownKernel(made.code, results)

    def _add(self, attempt: Attempt, kernel: KnownKernel | None) -> None:
        with self._lock:
            name, code = f"attempt {attempt.number}", kernel.code if kernel else ""
            digest = hashlib.sha256(code.encode()).hexdigest()[:16]
            append(self._folder / LOG, [stamp("attempt", self._arbiter.problem.name, name, digest, **asdict(attempt))])
            self.attempts.append(attempt)
            if kernel and summarize("", self.attempts).best is attempt:
                self._save(BEST, kernel.code)
            self._last = kernel or self._last
            self._say(attempt.line())
            self._fruitless = 0 if kernel else self._fruitless + 1
            if self._fruitless >= FRUITLESS:
                self._stopped.set()
                raise GeneratorFails(self._fruitless, attempt.reason)

    def _save(self, name: str, code: str) -> None:
        path = self._folder / name
        try:
            path.write_text(code, encoding="utf-8")
        except OSError as error:
            raise CannotWrite(path, error.strerror or str(error)) from None


def _read_attempts(path: Path, problem: str) -> list[Attempt]:
    """Return the attempts of earlier runs. A line that was cut off by a crash is left out."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(path.parent, error.strerror or str(error)) from None
    names = [one.name for one in fields(Attempt)]
    found = read(path).records if path.exists() else []
    for one in found:
        if one["kind"] != "attempt" or one["op"] != problem:
            raise RunOfAnotherProblem(path.parent, one["op"], problem)
    return [Attempt(**{name: one[name] for name in names}) for one in found]
