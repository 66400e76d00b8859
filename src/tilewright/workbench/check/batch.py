"""Judge the solutions of many problems, several at a time, in processes that stay warm.

Each judge process has imported torch and has a fork server of its own, so a further problem costs no start. A judge
that hangs or dies costs the verdict of one solution, and is replaced.
"""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilewright.errors import NoProblems, TilewrightError, first_line

PACKAGES = Path(__file__).parents[3]
# Removes the working folder from sys.path: a triton.py there must not shadow the real one.
BOOTSTRAP = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "from tilewright.workbench.check.batch import serve; serve(int(sys.argv[2]))"
)
SECONDS = 600.0  # per solution
MIN_BYTES = 2 * 2**30  # memory per judge, on a CPU
RESTART_BYTES = 2 * 2**30  # a judge that has used more is replaced, so that memory cannot pile up
SAMPLE = re.compile(r"level_(\d+)_problem_(\d+)_sample_\d+.*")  # the names in KernelBench's own folders of runs
REFUSED, MISSING = "refused", "no solution"


@dataclass(frozen=True)
class Job:
    """One solution of a problem, or None for a problem without a solution."""

    problem: Path
    name: str  # the problem's path in its folder
    solution: Path | None


@dataclass(frozen=True)
class Options:
    depth: str = "default"
    scale: Fraction | None = None
    seed: int | None = None


@dataclass
class Outcome:
    """The verdict on one solution: that of the check, `refused` if there is none, or `no solution`."""

    problem: str
    solution: str
    verdict: str
    reason: str = ""
    right_cases: int = 0
    cases: int = 0
    labels: list[str] = field(default_factory=list)
    speedup: float | None = None  # time of the reference / time of the solution; None: not measured
    content: dict[str, Any] = field(default_factory=dict)  # the whole Verdict


def find_problems(folder: Path) -> list[tuple[Path, str]]:
    """Return the problems below a folder, with their names."""
    if found := sorted(_problems(folder), key=lambda pair: _natural(pair[1])):
        return found
    raise NoProblems(folder)


def find_jobs(problems: Path, solutions: Path) -> tuple[list[Job], list[Path]]:
    """Return the problems in a folder with their solutions, and the files that solve none of them.

    A solution has the problem's path below its own folder, with or without the folders above the file, or is any file
    in a folder of that name; names like KernelBench's `level_1_problem_23_sample_0_kernel.py` are known too.
    """
    found = find_problems(problems)
    files = sorted(path for path in solutions.rglob("*.py") if not path.name.startswith((".", "_")))
    jobs, used = [], set()
    for path, name in found:
        own = [file for file in files if _solves(file.relative_to(solutions), name)]
        used |= {*own}
        jobs += [Job(path, name, file) for file in own] or [Job(path, name, None)]
    return jobs, [file for file in files if file not in used]


def judge_all(
    jobs: Sequence[Job],
    options: Options,
    device: str,
    count: int,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    measure: Callable[[Any, Path, str], float | None] | None = None,
) -> list[Outcome]:
    """Judge all jobs, `count` at a time. `measure` returns the speedup of a right solution of a problem."""
    judges = threading.local()
    started: list[_Judge] = []
    memory = _memory_per_judge(count) if device == "cpu" else 0
    lock = threading.Lock()

    def run(job: Job) -> Outcome:
        if job.solution is None:
            outcome = Outcome(job.name, "", MISSING)
        else:
            if not hasattr(judges, "mine"):
                judges.mine = _Judge(device, memory, measure)
                started.append(judges.mine)
            outcome = judges.mine.judge(job, options)
        with lock:
            on_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(count) as pool:
        try:
            return list(pool.map(run, jobs))
        finally:
            pool.shutdown(cancel_futures=True, wait=False)
            for judge in started:
                judge.end()


class _Judge:
    """A process that judges one solution after another."""

    def __init__(self, device: str, memory: int, measure: Any):
        self._arguments = device, memory, measure
        self._process: Any = None

    def judge(self, job: Job, options: Options) -> Outcome:
        if self._process is None:
            self._pipe, other = multiprocessing.Pipe()
            with other:  # not multiprocessing.Process, which would import the main script again
                command = [sys.executable, "-c", BOOTSTRAP, str(PACKAGES), str(other.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
            self._pipe.send(self._arguments)
        try:
            self._pipe.send((job, options))
            if not self._pipe.poll(SECONDS):
                raise TimeoutError(f"no verdict within {SECONDS:.0f} s")
            outcome, used = self._pipe.recv()
        except (EOFError, OSError) as error:
            reason = str(error) if isinstance(error, TimeoutError) else "its judge ended, perhaps for lack of memory"
            self.end()
            return Outcome(job.name, str(job.solution), REFUSED, reason)
        if used > RESTART_BYTES:
            self.end()
        return outcome

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()
            process.kill()
            process.wait()


def serve(file: int) -> None:
    """Judge what comes through the pipe with this file descriptor, in a process of its own."""
    pipe = Connection(file)
    device, memory, measure = pipe.recv()
    if memory:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            job, options = pipe.recv()
            outcome = judge_one(job, options, device, measure)
            pipe.send((outcome, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def judge_one(job: Job, options: Options, device: str, measure: Any = None) -> Outcome:
    """Return the outcome of one job, whatever happens."""
    from tilewright.workbench.check import check
    from tilewright.workbench.check.problems import load

    assert job.solution is not None
    outcome = Outcome(job.name, str(job.solution), REFUSED)
    problem = None
    try:
        problem = load(job.problem)
        problem.select(scale=options.scale, device=device)
        (verdict,) = check(
            problem.op,
            [],
            [job.solution],
            device=device,
            seed=options.seed,
            depth=options.depth,
            problem=problem,
        )
        outcome.verdict, outcome.reason, outcome.labels = verdict.verdict, verdict.reason, verdict.labels
        outcome.right_cases = sum(case.verdict == "right" for case in verdict.cases)
        outcome.cases, outcome.content = len(verdict.cases), verdict.as_json()
        if verdict.right and measure is not None:
            outcome.speedup = measure(problem, job.solution, device)
    except TilewrightError as error:
        outcome.reason = str(error)
    except Exception as error:  # one problem must not end the others
        outcome.reason = first_line(error)
    finally:
        if problem is not None:
            problem.close()
    return outcome


def _problems(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.name == "task.yml":
            yield path.parent, str(name.parent)
        elif path.suffix == ".py" and _defines_model(path):
            yield path, str(name.with_suffix(""))


def _defines_model(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {"Model", "get_inputs"} <= defined


def _solves(file: Path, problem: str) -> bool:
    parts = tuple(problem.split("/"))
    if sample := SAMPLE.fullmatch(file.stem):
        level, number = sample.groups()
        return parts[-1].startswith(f"{number}_") and (len(parts) < 2 or parts[-2] == f"level{level}")
    path, folder = file.with_suffix("").parts, file.parent.parts
    return any(other and other == parts[-len(other) :] for other in (path, folder))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that puts 2_x before 10_x."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _memory_per_judge(count: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return max(MIN_BYTES, 1024 * int(lines["MemAvailable"].split()[0]) // count)
    return 0
