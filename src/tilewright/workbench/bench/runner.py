"""Check the kernels of one Op, and time those that are right, case by case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright import hardware
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.timer import Clock, floor_us, require_working_gpu
from tilewright.workbench.bench.case_runner import THOROUGH, Candidate, CaseRunner, Effort, Timing
from tilewright.workbench.check import FORWARD_ONLY, UserKernel, Verdict, check
from tilewright.workbench.check.cases import CheckCase
from tilewright.worker.execute import KernelFailed
from tilewright.worker.parent import Worker

if TYPE_CHECKING:
    from tilewright.workbench.check.problems import Problem

SAMPLES = 50
IMPLAUSIBLE = 1.25  # times the measured ceiling, for a GPU without a datasheet


def step_count(
    kernels: Sequence[Kernel], files: Sequence[Path], cases: Sequence[Case], directions: Sequence[str]
) -> int:
    """Return the maximum number of calls of `on_step`."""
    once = sum(not kernel.builds_per_case for kernel in kernels) + len(files)
    return once + len(cases) * (1 + len(directions))


def bench(
    op: Op,
    kernels: Sequence[Kernel],
    files: Sequence[Path] = (),
    *,
    clock: Clock,
    cases: Sequence[Case | CheckCase],
    directions: Sequence[str] = ("forward",),
    samples: int = SAMPLES,
    device: str = "cuda",
    against: str = "eager",
    physical: Callable[[Cost], float] = lambda _: 0.0,
    proven: Collection[str] = (),
    on_step: Callable[[str], None] = lambda _: None,
    problem: Problem | None = None,
    effort: Effort = THOROUGH,
    captured: bool = False,
) -> Iterator[Timing]:
    """Yield the timings of all kernels, case by case. A CheckCase also says how its tensors are laid out.

    `physical` returns the minimum seconds of a Cost, `proven` names kernels and files that were checked before, and
    `on_step` is called with a description of each step. With a third-party `problem`, `op` is that problem's and the
    files hold solutions of it. With `captured`, forward calls are timed in a CUDA graph.
    """
    floor = floor_us(clock)
    proven = proven if effort.is_checked else {kernel.name for kernel in kernels}
    check_cases = [case if isinstance(case, CheckCase) else CheckCase(case) for case in cases]
    plain = [case.case for case in check_cases]
    with contextlib.ExitStack() as stack:
        candidates = [*_op_candidates(op, kernels, proven, plain, directions, device, on_step)]
        for path in files:
            on_step(f"checking {path.name}")
            worker = stack.enter_context(Worker(device=device))
            candidates.append(_file_candidate(op, path, plain, worker, problem, path.name in proven))
        for case in check_cases:
            case_runner = CaseRunner(
                op, case, candidates, clock, samples, device, against, physical, floor, effort, captured
            )
            yield from case_runner.run(directions, on_step)
            del case_runner
            if device == "cuda":
                torch.cuda.empty_cache()  # workers need memory too


def physical_seconds(measured: Mapping[str, float], device: Mapping[str, Any]) -> Callable[[Cost], float]:
    """Return a function that gives the minimum time of a Cost on a GPU, by its datasheet.

    Only bytes read and matrix multiplications count: written bytes may stay in the L2, and other arithmetic may run on
    a faster unit.
    """
    sheet = hardware.DATASHEETS.get(device["gpu"])
    rates = sheet.rates() if sheet else {unit: IMPLAUSIBLE * rate for unit, rate in measured.items()}

    def min_seconds(cost: Cost) -> float:
        bytes_moved = cost.read + max(0, cost.written - device["l2"])
        gemms = {unit: amount for unit, amount in cost.flops.items() if unit.startswith("tensor.")}
        work = {"read": bytes_moved, **gemms}
        return max((amount / rates[unit] for unit, amount in work.items() if unit in rates), default=0.0)

    return min_seconds


def _op_candidates(
    op: Op,
    kernels: Sequence[Kernel],
    proven: Collection[str],
    cases: Sequence[Case],
    directions: Sequence[str],
    device: str,
    on_step: Callable[[str], None],
) -> Iterator[Candidate]:
    """Check the kernels of an op, with gradients only if they are timed.

    Kernels that are compiled per case are checked later, on the timed cases.
    """
    if [*directions] == ["forward"]:
        kernels = [replace(kernel, differentiable=False) for kernel in kernels]
    checked = [kernel for kernel in kernels if not kernel.builds_per_case and kernel.name not in proven]
    depth, dtypes = "default" if op.file else "quick", sorted({case.dtype for case in cases})
    verdicts = check(op, checked, device=device, dtypes=dtypes, depth=depth)
    for kernel in kernels:
        verdict = Verdict(op.name, kernel.name, "right")
        if kernel in checked:
            on_step(f"checking {kernel.name}")
            verdict = next(verdicts)
            takes_timed = verdict.verdict == "unsupported" and any(kernel.fits(*op.make(c, "meta")) for c in cases)
            if takes_timed and depth == "quick":  # a kernel for few shapes, which a quick check may not meet
                (verdict,) = check(op, [kernel], device=device, dtypes=dtypes)
            require_working_gpu(kernel.name)
        if FORWARD_ONLY in verdict.labels:
            kernel = replace(kernel, differentiable=False)
        yield Candidate(kernel, verdict)


def _file_candidate(
    op: Op, path: Path, cases: Sequence[Case], worker: Worker, problem: Problem | None, is_proven: bool
) -> Candidate:
    if is_proven:
        verdict = Verdict(op.name, path.name, "right")
    else:
        dtypes = sorted({case.dtype for case in cases})
        verdict = next(iter(check(op, files=[path], device=worker.device, dtypes=dtypes, problem=problem)))
    has_gradient = op.backward_cost is not None and FORWARD_ONLY not in verdict.labels
    if verdict.verdict == "right":
        try:
            if problem:
                file, more = problem.unpack(path)
                worker.load(None, file=file, solution=problem.solution(worker.device) | more)
            else:
                worker.load(op.file.stem if op.file else op.name, file=path, is_own=bool(op.file))
        except KernelFailed as failure:
            verdict = Verdict(op.name, path.name, "crashed", f"when the file was loaded again: {failure}")
    kernel = UserKernel(path.name, has_gradient)
    return Candidate(kernel, verdict, worker)
