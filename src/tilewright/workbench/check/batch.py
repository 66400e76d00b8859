"""Judge the solutions of many problems, several at a time, in processes that stay warm.

Each judge process has imported torch and has a fork server of its own, so a further problem costs no start. A judge
that hangs or dies costs the verdict of one solution, and is replaced.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import multiprocessing
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilewright.errors import NoProblems, TilewrightError, first_line
from tilewright.workbench.check.problems.flashinfer import is_definition, solves

PACKAGES = Path(__file__).parents[3]
# Removes the working folder from sys.path: a triton.py there must not shadow the real one.
BOOTSTRAP = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "from tilewright.workbench.check.batch import serve; serve(int(sys.argv[2]))"
)
SECONDS = 600.0  # per solution
END_SECONDS = 2.0  # for a judge to end
MIN_BYTES = 2 * 2**30  # memory per judge, on a CPU
# A judge that has used more memory is replaced, so that it cannot pile up. CUDA maps some of it.
RESTART_BYTES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}
# Memory on a GPU that judging takes: this, and a multiple of the bytes of a call.
GPU_BYTES, GPU_FACTOR = 18 * 2**30, 6
SAMPLE = re.compile(r"level_(\d+)_problem_(\d+)_sample_\d+.*")  # the names in KernelBench's own folders of runs
REFUSED, MISSING, PENDING = "refused", "no solution", "not judged"


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
    """The verdict on one solution: that of the check, `refused` if it has none, `no solution`, or `not judged` yet."""

    problem: str
    solution: str
    verdict: str
    reason: str = ""
    right_cases: int = 0
    cases: int = 0
    labels: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that loading and checking took, without waiting for memory on a GPU
    speedup: float | None = None  # time of the reference / time of the solution; None: not measured
    content: dict[str, Any] = field(default_factory=dict)  # the whole Verdict


def find_problems(folder: Path) -> list[tuple[Path, str]]:
    """Return the problems below a folder, with their names."""
    if found := sorted(_problems(folder), key=lambda pair: _natural(pair[1])):
        return found
    raise NoProblems(folder)


def find_jobs(problems: Path, solutions: Path) -> tuple[list[Job], list[Path]]:
    """Return the problems in a folder with their solutions, and the files that solve none of them.

    A JSON solution names its definition. Another one has the problem's path below its own folder, with or without the
    folders above the file, or is any file in a folder of that name; names like KernelBench's
    `level_1_problem_23_sample_0_kernel.py` are known too.
    """
    found = find_problems(problems)
    files = sorted(
        p for p in solutions.rglob("*") if p.suffix in (".py", ".json") and p.name[0] not in "._" and p.is_file()
    )
    jobs, used = [], set()
    for path, name in found:
        own = [file for file in files if _solves(solutions, file, name)]
        used |= {*own}
        jobs += [Job(path, name, file) for file in own] or [Job(path, name, None)]
    return jobs, [file for file in files if file not in used]


def judge_all(
    jobs: Sequence[Job],
    options: Options,
    device: str,
    count: int,
    on_outcome: Callable[[Job, Outcome], None] = lambda job, outcome: None,
    measure: Callable[[Any, Path, str], float | None] | None = None,
) -> list[Outcome]:
    """Judge all jobs, `count` at a time. `measure` returns the speedup of a right solution of a problem.

    `on_outcome` is called after each. An interrupt ends the judges, and no outcome is reported for what they were at.
    """
    judges, stopped = threading.local(), threading.Event()
    started: list[_Judge] = []
    gpu = _Budget(_gpu_bytes() if device == "cuda" else 0)
    memory = _memory_per_judge(count) if device == "cpu" else 0
    lock = threading.Lock()

    def run(job: Job) -> Outcome:
        if job.solution is None:
            outcome = Outcome(job.name, "", MISSING)
        else:
            if not hasattr(judges, "mine"):
                judges.mine = _Judge(device, memory, measure, gpu)
                started.append(judges.mine)
            outcome = judges.mine.judge(job, options)
        with lock:
            if not stopped.is_set():
                on_outcome(job, outcome)
        return outcome

    with ThreadPoolExecutor(count) as pool:
        try:
            return list(pool.map(run, jobs))
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True, wait=False)
            for judge in started:
                judge.interrupt()
            for judge in started:
                judge.end()


class _Judge:
    """A process that judges one solution after another."""

    def __init__(self, device: str, memory: int, measure: Any, gpu: _Budget):
        self._arguments, self._device, self._gpu = (device, memory, measure), device, gpu
        self._process: Any = None

    def judge(self, job: Job, options: Options) -> Outcome:
        if self._process is None:
            self._pipe, other = multiprocessing.Pipe()
            with other:  # not multiprocessing.Process, which would import the main script again
                command = [sys.executable, "-c", BOOTSTRAP, str(PACKAGES), str(other.fileno())]
                # Ctrl-C is for the parent, which ends the judges; and what a problem prints is no part of the report.
                detached: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": 2, "start_new_session": True}
                self._process = subprocess.Popen(command, pass_fds=[other.fileno()], **detached)
            self._pipe.send(self._arguments)
        try:
            self._pipe.send((job, options))
            with self._gpu.taken(self._receive()):
                self._pipe.send("go")
                outcome, used = self._receive()
        except (EOFError, OSError) as error:
            reason = str(error) if isinstance(error, TimeoutError) else self._exit_reason()
            self.end()
            return Outcome(job.name, str(job.solution), REFUSED, reason)
        if used > RESTART_BYTES[self._device]:
            self.end()
        return outcome

    def _receive(self) -> Any:
        if not self._pipe.poll(SECONDS):
            raise TimeoutError(f"no verdict within {SECONDS:.0f} s")
        return self._pipe.recv()

    def _exit_reason(self) -> str:
        """Return how the judge ended, which runs the problem's own code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_SECONDS)
            if code == -signal.SIGKILL:
                return "its judge was killed, perhaps for lack of memory"
            name = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"its judge {name}, perhaps by the problem's own code"
        return "its judge sends no verdict"

    def interrupt(self) -> None:
        """Have the process end, after it has deleted its temporary files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        self.interrupt()
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(file: int) -> None:
    """Judge what comes through the pipe with this file descriptor, in a process of its own."""
    pipe = Connection(file)
    device, memory, measure = pipe.recv()
    if memory:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    signal.signal(signal.SIGINT, lambda *_: sys.exit())
    with contextlib.suppress(EOFError, OSError):
        while True:
            job, options = pipe.recv()

            def wait_for(needed: int) -> None:
                pipe.send(needed)
                pipe.recv()

            outcome = judge_one(job, options, device, measure, wait_for)
            _free_gpu(device)  # before another judge takes the memory
            pipe.send((outcome, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


class _Budget:
    """Bytes that several threads share. One alone may take more than there are."""

    def __init__(self, total: int):
        self._total, self._free = total, total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Wait until `count` bytes are free, and hold them."""
        count = min(count, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


def _free_gpu(device: str) -> None:
    if device == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _gpu_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def judge_one(
    job: Job,
    options: Options,
    device: str,
    measure: Any = None,
    wait_for: Callable[[int], None] = lambda needed: None,
) -> Outcome:
    """Return the outcome of one job, whatever happens. `wait_for` is called once, with the memory it needs on a GPU."""
    from tilewright.workbench.check import call_bytes, check
    from tilewright.workbench.check.problems import load

    assert job.solution is not None
    outcome = Outcome(job.name, str(job.solution), REFUSED)
    problem, needed, waited = None, 0, 0.0
    started = time.monotonic()
    try:
        try:
            problem = load(job.problem)
            problem.select(scale=options.scale, device=device)
            if device == "cuda":
                needed = GPU_BYTES + GPU_FACTOR * call_bytes(problem.op, problem.op.check[-1])
        finally:
            before = time.monotonic()
            wait_for(needed)
            waited = time.monotonic() - before
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
        outcome.seconds = round(time.monotonic() - started - waited, 2)
        if verdict.right and measure is not None:
            outcome.speedup = measure(problem, job.solution, device)
    except TilewrightError as error:
        outcome.reason = str(error)
    except Exception as error:  # one problem must not end the others
        outcome.reason = first_line(error)
    finally:
        outcome.seconds = outcome.seconds or round(time.monotonic() - started - waited, 2)
        if problem is not None:
            problem.close()
    return outcome


def _problems(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.name == "task.yml":
            yield path.parent, str(name.parent)
        elif (path.suffix == ".py" and _defines_model(path)) or (path.suffix == ".json" and is_definition(path)):
            yield path, str(name.with_suffix(""))


def _defines_model(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {"Model", "get_inputs"} <= defined


def _solves(folder: Path, path: Path, problem: str) -> bool:
    parts, file = tuple(problem.split("/")), path.relative_to(folder)
    if path.suffix == ".json":
        return solves(path) == parts[-1]
    if sample := SAMPLE.fullmatch(file.stem):
        level, number = sample.groups()
        return parts[-1].startswith(f"{number}_") and (len(parts) < 2 or parts[-2] == f"level{level}")
    own, folders = file.with_suffix("").parts, file.parent.parts
    return any(other and other == parts[-len(other) :] for other in (own, folders))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that puts 2_x before 10_x."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _memory_per_judge(count: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return max(MIN_BYTES, 1024 * int(lines["MemAvailable"].split()[0]) // count)
    return 0
