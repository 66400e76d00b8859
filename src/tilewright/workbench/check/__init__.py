"""Check whether kernels are right. Each gets a Verdict with the evidence of every case."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright import sandbox, source
from tilewright.errors import InvalidKernelFile
from tilewright.spec import Case, Kernel, Op
from tilewright.workbench.check.cases import plan_cases
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import (
    FORWARD_ONLY,
    NOT_RIGHT,
    OWN_INPUTS_ONLY,
    CaseVerdict,
    InProcess,
    Judge,
    UserKernel,
    Verdict,
)
from tilewright.worker.execute import KernelFailed
from tilewright.worker.parent import Worker

if TYPE_CHECKING:
    from tilewright.workbench.check.problems import Problem

__all__ = [
    "FORWARD_ONLY",
    "NOT_RIGHT",
    "OWN_INPUTS_ONLY",
    "CaseVerdict",
    "UserKernel",
    "Verdict",
    "case_count",
    "check",
]


def check(
    op: Op,
    kernels: Sequence[Kernel] = (),
    files: Sequence[Path] = (),
    *,
    device: str,
    cases: Sequence[Case] | None = None,
    dtypes: Sequence[str] | None = None,
    seed: int | None = None,
    depth: str = "default",
    problem: Problem | None = None,
    requires_gradient: bool = False,
    on_case: Callable[[], None] = lambda: None,
) -> Iterator[Verdict]:
    """Yield a Verdict for each kernel and each user's file. `on_case` is called after every case.

    With a third-party `problem`, `op` is that problem's and the files hold solutions of it. With `requires_gradient`, a
    user's kernel without a gradient is wrong where the Op has one.
    """
    seed = secrets.randbits(32) if seed is None else seed
    references = ReferenceRuns(op, device, seed)
    planned = plan_cases(op, cases, dtypes or op.dtypes, depth, seed, device, is_problem=problem is not None)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(Worker(device=device))
        for kernel in kernels:
            if device == "cpu" and (reason := _gpu_only(kernel)):
                yield Verdict(op.name, kernel.name, "unsupported", reason, seed=seed)
                continue
            host = InProcess(kernel.fn, device)
            if device == "cpu" and kernel.language in ("triton", "numba"):
                host = shared
                try:
                    shared.load(op.name, kernel=kernel.name)
                except KernelFailed as failure:
                    yield Verdict(op.name, kernel.name, "crashed", f"while loading it: {failure}", seed=seed)
                    continue
            judge = Judge(op, kernel, host, references, device, requires_gradient=requires_gradient)
            yield judge.judge(planned, on_case)
        solution = problem.solution(device) if problem and files else None
        for path in files:
            source.require_python_file(path)
            worker = stack.enter_context(Worker(device=device))
            kernel = UserKernel(path.name, differentiable=op.backward_cost is not None)
            judge = Judge(
                op, kernel, worker, references, device, problem.own_check if problem else None, requires_gradient
            )
            try:
                worker.start()
                judge.prepare(planned)  # while the process starts
                worker.load(None if problem else op.name, file=path, solution=solution)
            except KernelFailed as failure:
                if failure.kind == "usage":
                    raise InvalidKernelFile(str(failure)) from None
                reason = f"while loading the file: {failure}"
                yield Verdict(op.name, path.name, failure.kind, reason, seed=seed, file=str(path))
                continue
            verdict = judge.judge(planned, on_case)
            verdict.labels += problem.labels if problem else []
            verdict.isolation, verdict.file = worker.isolation, str(path)
            if missing := [layer for layer in _layers(device) if layer not in worker.isolation]:
                verdict.labels.append(f"isolated without {', '.join(missing)}" if worker.isolation else "not isolated")
            yield verdict
            worker.close()


def case_count(
    op: Op,
    kernels: Sequence[Kernel],
    files: Sequence[Path],
    cases: Any,
    dtypes: Any,
    depth: str,
    device: str,
    is_problem: bool = False,
) -> int:
    """Return how often `check` calls `on_case` at most."""
    planned = plan_cases(op, cases, dtypes or op.dtypes, depth, 0, device, is_problem)
    return (len(kernels) + len(files)) * len(planned)


def _layers(device: str) -> list[str]:
    """Return the sandbox layers that a device permits."""
    impossible = () if device == "cpu" else ("rlimit memory", "seccomp processes")
    return [layer for layer in sandbox.ALL_LAYERS if layer not in impossible]


def _gpu_only(kernel: Kernel) -> str | None:
    if kernel.language == "cuda" or kernel.origin == "peer":
        return "needs a GPU"
    if kernel.builds_per_case:
        return "needs a GPU: compiled for a CPU it would be another program"
    return None
