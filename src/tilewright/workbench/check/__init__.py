"""Is a kernel right? A Verdict for each, on the evidence of every case."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright import sandbox, source
from tilewright.errors import FileUnusable
from tilewright.spec import Case, Kernel, Op
from tilewright.workbench.check.cases import plan
from tilewright.workbench.check.expected import Answers
from tilewright.workbench.check.judge import FORWARD_ONLY, NOT_RIGHT, CaseVerdict, Here, Judge, Verdict
from tilewright.worker.execute import KernelFailed
from tilewright.worker.parent import Worker

if TYPE_CHECKING:
    from tilewright.workbench.check.problems import Problem

__all__ = ["FORWARD_ONLY", "NOT_RIGHT", "CaseVerdict", "Verdict", "case_count", "check"]


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
    on_case: Callable[[], None] = lambda: None,
) -> Iterator[Verdict]:
    """A Verdict for each kernel and each user's file, as it is reached. `on_case` is called after every case.

    With a foreign `problem`, whose Op this then is, the files hold solutions of it.
    """
    seed = secrets.randbits(32) if seed is None else seed
    answers = Answers(op, device, seed)
    trials = plan(op, cases, dtypes or op.dtypes, depth, seed, device)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(Worker(device=device))
        for kernel in kernels:
            if device == "cpu" and (reason := _gpu_only(kernel)):
                yield Verdict(op.name, kernel.name, "unsupported", reason, seed=seed)
                continue
            performer = Here(kernel.fn, device)
            if device == "cpu" and kernel.language in ("triton", "numba"):
                performer = shared
                try:
                    shared.load(op.name, kernel=kernel.name)
                except KernelFailed as failure:
                    yield Verdict(op.name, kernel.name, "crashed", f"while loading it: {failure}", seed=seed)
                    continue
            yield Judge(op, kernel, performer, answers, device).judge(trials, on_case)
        for path in files:
            source.require_python_file(path)
            own = stack.enter_context(Worker(device=device))
            user = Kernel(path.name, own.call, "python", lambda *_: True, differentiable=op.backward_cost is not None)
            judge = Judge(op, user, own, answers, device, theirs=problem.theirs if problem else None)
            try:
                own.start()
                judge.prepare(trials)  # while the process starts
                if problem:
                    own.load(None, file=path, solution=problem.solution(device))
                else:
                    own.load(op.name, file=path)
            except KernelFailed as failure:
                if failure.kind == "usage":
                    raise FileUnusable(str(failure)) from None
                said = f"while loading the file: {failure}"
                yield Verdict(op.name, path.name, failure.kind, said, seed=seed, file=str(path))
                continue
            verdict = judge.judge(trials, on_case)
            verdict.labels += problem.labels if problem else []
            verdict.isolation, verdict.file = own.isolation, str(path)
            if missing := [layer for layer in _layers(device) if layer not in own.isolation]:
                verdict.labels.append(f"isolated without {', '.join(missing)}" if own.isolation else "not isolated")
            yield verdict
            own.close()


def case_count(
    op: Op, kernels: Sequence[Kernel], files: Sequence[Path], cases: Any, dtypes: Any, depth: str, device: str
) -> int:
    """How many times `on_case` will be called at most."""
    return (len(kernels) + len(files)) * len(plan(op, cases, dtypes or op.dtypes, depth, 0, device))


def _layers(device: str) -> list[str]:
    """Those that can hold: what a GPU needs is left open."""
    needed = () if device == "cpu" else ("rlimit memory", "seccomp processes")
    return [layer for layer in sandbox.ALL_LAYERS if layer not in needed]


def _gpu_only(kernel: Kernel) -> str | None:
    if kernel.language in ("cuda", "peer"):
        return "needs a GPU"
    if kernel.builds_per_case:
        return "needs a GPU: compiled for a CPU it would be another program"
    return None
