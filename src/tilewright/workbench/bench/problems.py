"""Time a solution of a third-party problem beside the problem's reference."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from tilewright.timer import timer_for
from tilewright.workbench.check import call_bytes
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.problems import Problem
from tilewright.worker import tf32
from tilewright.worker.execute import KernelFailed
from tilewright.worker.parent import Worker
from tilewright.worker.timed_run import InputPool, TimedRun

SAMPLES = 20


def speedup(problem: Problem, path: Path, device: str, samples: int = SAMPLES) -> float | None:
    """Return the time of the reference over that of the solution on the last case; None if it cannot be timed.

    The two take turns, so that both see the same clocks and temperatures.
    """
    case = CheckCase(problem.op.check[-1])
    references = ReferenceRuns(problem.op, device, seed=0, destinations=problem.destinations)
    request = references.request(case, references(case, with_gradients=False))
    clock = timer_for(device)
    file, more = problem.unpack(path)
    more["new_model_per_call"] = False  # its construction is not timed
    shared = call_bytes(problem.op, case.case)
    with Worker(device=device, shared=shared) as worker, tf32.allowed(problem.tf32):
        try:
            worker.load(None, file=file, solution=problem.solution(device) | more)
            worker.begin([request], "forward")
            reference = problem.baseline(case.case, device)
            baseline = TimedRun(reference, InputPool([request], device), "forward", clock)
            both = (baseline, worker)
            for run in both:
                run.warm_up()
            taken = [[run.sample().us for run in both] for _ in range(samples)]
        except KernelFailed:
            return None
    ours = median(pair[1] for pair in taken)
    return median(pair[0] for pair in taken) / ours if ours > 0 else None
