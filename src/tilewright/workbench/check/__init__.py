"""Check whether kernels are right. Each gets a Verdict with the evidence of every case."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilewright import sandbox, source
from tilewright.errors import BadReference, InvalidKernelFile, first_line
from tilewright.spec import Case, Kernel, Op
from tilewright.workbench.check.cases import CheckCase, element_count, plan_cases
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
from tilewright.workbench.check.repeatable import unsound
from tilewright.worker.execute import KernelFailed, flatten
from tilewright.worker.memory import GUARD
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
    "call_bytes",
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
    if problem and not problem.is_selected:
        problem.select(device=device)
    if op.file:
        _require_sound(op, cases or op.check, device, seed)
    destinations: dict[str, Any] = {"destinations": problem.destinations} if problem else {}
    references = ReferenceRuns(op, device, seed, **destinations)
    planned = _plan(op, cases, dtypes, depth, seed, device, problem)
    shared_bytes = max((call_bytes(op, one.case) for one in planned), default=0) if files and device == "cuda" else 0
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(Worker(device=device))
        solution = problem.solution(device) if problem and files else None

        def judge_file(path: Path, function: str | None = None) -> Verdict:
            """Judge the kernel of the operation in a file, or the named function, in a process of its own."""
            file, more = problem.unpack(path) if problem else (path, {})
            source.require_python_file(file)
            kernel = UserKernel(function or path.name, differentiable=op.backward_cost is not None)
            own_check = problem.own_check if problem else None
            with Worker(device=device, shared=shared_bytes) as worker:
                judge = Judge(op, kernel, worker, references, device, own_check, requires_gradient)
                try:
                    worker.start()
                    judge.prepare(planned)  # while the process starts
                    name = op.file.stem if op.file else op.name
                    loaded = solution | more if solution else None
                    worker.load(
                        None if problem else name, file=file, function=function, is_own=bool(op.file), solution=loaded
                    )
                except KernelFailed as failure:
                    if failure.kind == "usage":
                        raise InvalidKernelFile(str(failure)) from None
                    reason = f"while loading the file: {failure}"
                    return Verdict(op.name, kernel.name, failure.kind, reason, seed=seed, file=str(path))
                verdict = judge.judge(planned, on_case)
                verdict.isolation, verdict.file = worker.isolation, str(path)
            verdict.labels += problem.labels if problem else []
            if problem and verdict.verdict in NOT_RIGHT and problem.is_shrunk(verdict.reason):
                verdict.reason += "; at smaller sizes than the problem's own, for which the file may not be written"
            if op.file and len({case.case.point for case in planned}) == 1:
                verdict.labels.append("at one size")
            if missing := [layer for layer in _layers(device) if layer not in verdict.isolation]:
                verdict.labels.append(f"isolated without {', '.join(missing)}" if verdict.isolation else "not isolated")
            return verdict

        for kernel in kernels:
            if op.file and kernel.origin == "user":
                yield judge_file(op.file, kernel.name)
                continue
            if device == "cpu" and (reason := _gpu_only(kernel)):
                yield Verdict(op.name, kernel.name, "unsupported", reason, seed=seed)
                continue
            host = InProcess(kernel.fn, device)
            if device == "cpu" and kernel.language in ("triton", "gluon", "numba"):
                host = shared
                try:
                    shared.load(op.name, kernel=kernel.name)
                except KernelFailed as failure:
                    yield Verdict(op.name, kernel.name, "crashed", f"while loading it: {failure}", seed=seed)
                    continue
            judge = Judge(op, kernel, host, references, device, requires_gradient=requires_gradient)
            yield judge.judge(planned, on_case)
        for path in files:
            yield judge_file(path)


def _require_sound(op: Op, cases: Sequence[Case], device: str, seed: int) -> None:
    """Raise if no kernel can be compared with the reference of a user's operation."""
    case = min(cases, key=lambda case: element_count(op, case))
    args = op.make(case.with_dtype(op.dtypes[0]), device, seed)
    try:
        reason = unsound(op.reference, args)
    except Exception as error:  # a user's reference may raise anything
        reason = f"fails ({first_line(error)})"
    if reason:
        name = getattr(op.reference, "__name__", type(op.reference).__name__)
        raise BadReference(op.file, name, reason)


def case_count(
    op: Op,
    kernels: Sequence[Kernel],
    files: Sequence[Path],
    cases: Any,
    dtypes: Any,
    depth: str,
    device: str,
    problem: Problem | None = None,
) -> int:
    """Return how often `check` calls `on_case` at most."""
    return (len(kernels) + len(files)) * len(_plan(op, cases, dtypes, depth, 0, device, problem))


def _plan(
    op: Op, cases: Any, dtypes: Any, depth: str, seed: int, device: str, problem: Problem | None
) -> list[CheckCase]:
    planned = plan_cases(op, cases, dtypes or op.dtypes, depth, seed, device, is_problem=problem is not None)
    once = problem.once if problem else []
    return planned + [CheckCase(case) for case in (once[-1:] if depth == "quick" else once)]


def call_bytes(op: Op, case: Case) -> int:
    """Return about how many bytes a call sends or gets back."""
    args = op.make(case, "meta")
    try:
        outputs = flatten(op.reference(*args))
    except Exception:  # a reference may need values
        outputs = []
    once = sum(t.nbytes + 4 * GUARD for t in [*args, *outputs] if isinstance(t, Tensor))
    return once if op.backward_cost is None else 2 * once  # gradients are as large


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
