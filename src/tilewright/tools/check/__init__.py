"""Is a kernel right? A Verdict for each, on the evidence of every case."""

from __future__ import annotations

import contextlib
import inspect
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import registry
from tilewright.errors import FileUnusable
from tilewright.spec import Case, Kernel, Op
from tilewright.tools.check.budget import Expected, Mismatch, compare, expect
from tilewright.tools.check.trials import Trial, plan
from tilewright.worker import Inputs, KernelFailed, Worker, run_kernel

# Without a GPU a case larger than this would take minutes; its elements, all inputs together.
SIMULATED_ELEMENTS = {"triton": 2**21, "numba": 1100, "python": 2**21}
NOT_RIGHT = ("wrong", "crashed", "timeout")
FORWARD_ONLY = "forward only"  # the label of a user's kernel that torch cannot differentiate

Run = Callable[..., tuple[list[Tensor], list[Tensor]]]  # as Worker.call


@dataclass
class CaseVerdict:
    case: str
    dtype: str
    verdict: str  # right, wrong, crashed, timeout, unsupported
    max_error: float = 0.0
    budget: float = 0.0
    reason: str = ""


@dataclass
class Verdict:
    op: str
    kernel: str
    verdict: str
    reason: str = ""
    labels: list[str] = field(default_factory=list)
    cases: list[CaseVerdict] = field(default_factory=list)
    isolation: list[str] = field(default_factory=list)  # the layers that held a user's file
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
    on_case: Callable[[], None] = lambda: None,
) -> Iterator[Verdict]:
    """A Verdict for each kernel and each user's file, as it is reached. `on_case` is called after every case."""
    seed = secrets.randbits(32) if seed is None else seed
    questions = plan(op, cases, dtypes or op.dtypes, depth, seed)
    answers = _Answers(op, device, seed)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(Worker(device=device))
        for kernel in kernels:
            if device == "cpu" and (reason := _gpu_only(kernel)):
                yield Verdict(op.name, kernel.name, "unsupported", reason, seed=seed)
                continue
            run = _in_process(kernel)
            if device == "cpu" and kernel.language in ("triton", "numba"):
                run = shared.call
                try:
                    shared.load(op.name, kernel=kernel.name)
                except KernelFailed as failure:
                    yield Verdict(op.name, kernel.name, "crashed", f"while loading it: {failure}", seed=seed)
                    continue
            yield _judge(op, kernel, run, questions, answers, device, on_case)
        for path in files:
            registry.require_python_file(path)
            own = stack.enter_context(Worker(device=device))
            user = Kernel(path.name, own.call, "python", lambda *_: True, differentiable=op.backward_cost is not None)
            try:
                own.load(op.name, file=path)
            except KernelFailed as failure:
                if failure.kind == "usage":
                    raise FileUnusable(str(failure)) from None
                yield Verdict(op.name, path.name, failure.kind, f"while loading the file: {failure}", seed=seed)
                continue
            verdict = _judge(op, user, own.call, questions, answers, device, on_case)
            verdict.isolation = own.isolation
            yield verdict


def case_count(op: Op, kernels: Sequence[Kernel], files: Sequence[Path], cases: Any, dtypes: Any, depth: str) -> int:
    """How many times `on_case` will be called at most."""
    return (len(kernels) + len(files)) * len(plan(op, cases, dtypes or op.dtypes, depth, 0))


class _Answers:
    """Inputs and expected results by case, made once for all kernels."""

    def __init__(self, op: Op, device: str, seed: int):
        self._op, self._device, self.seed = op, device, seed
        self._names = list(inspect.signature(op.reference).parameters)
        self._known: dict[tuple[Any, ...], tuple[tuple[Any, ...], Tensor | None, list[Expected]]] = {}

    def __call__(
        self, trial: Trial, with_gradients: bool, other: int = 0
    ) -> tuple[tuple[Any, ...], Tensor | None, list[Expected]]:
        """`other` numbers further values of the same case."""
        case, key = trial.case, (trial.case, trial.values, with_gradients, other)
        if key not in self._known:
            args = self._op.make(case, self._device, self.seed + 2 * other, trial.values)
            grad = None
            if with_gradients:
                shape = self._op.reference(*self._op.make(case, "meta")).shape
                generator = torch.Generator(self._device).manual_seed(self.seed + 2 * other + 1)
                grad = torch.randn(shape, generator=generator, device=self._device).to(getattr(torch, case.dtype))
            leaves = [n for n, a in zip(self._names, args, strict=False) if _is_float(a)]
            self._known[key] = (args, grad, expect(self._op.reference, args, grad, leaves))
        return self._known[key]


def _judge(
    op: Op,
    kernel: Kernel,
    run: Run,
    questions: list[Trial],
    answers: _Answers,
    device: str,
    on_case: Callable[[], None],
) -> Verdict:
    verdict = Verdict(op.name, kernel.name, "right", seed=answers.seed)
    todo = questions
    if kernel.builds_per_case and len(questions) > 2:
        todo = [questions[0], questions[-1]]
        verdict.labels.append(f"{len(todo)} of {len(questions)} cases, since each is compiled anew")
    for trial in todo:
        result = _judge_trial(op, kernel, run, trial, answers, device, verdict)
        verdict.cases.append(result)
        on_case()
        if result.verdict in ("crashed", "timeout"):  # the rest would end the same way, only later
            break
    bad = [case for case in verdict.cases if case.verdict in NOT_RIGHT]
    skipped = Counter(case.reason for case in verdict.cases if case.verdict == "unsupported")
    if bad:
        verdict.verdict = bad[0].verdict
        verdict.reason = f"{bad[0].case} {bad[0].dtype}: {bad[0].reason}"
    elif not any(case.verdict == "right" for case in verdict.cases):
        verdict.verdict, verdict.reason = "unsupported", "; ".join(skipped)
    else:
        verdict.labels += [f"{count} left out: {reason}" for reason, count in skipped.items()]
    return verdict


def _judge_trial(
    op: Op, kernel: Kernel, run: Run, trial: Trial, answers: _Answers, device: str, verdict: Verdict
) -> CaseVerdict:
    case = trial.case
    shapes = op.make(case, device="meta")
    reason = None if kernel.fits(*shapes) else "the kernel does not take such a case"
    if device == "cpu":
        reason = reason or _cannot_simulate(kernel, shapes)
    if reason:
        return CaseVerdict(str(trial), case.dtype, "unsupported", reason=reason)
    try:
        found, got = _ask(kernel, run, trial, answers, verdict)
        if trial.again and found.verdict == "right":
            found = _ask_again(kernel, run, trial, answers, verdict, found, got)
    except KernelFailed as failure:
        return CaseVerdict(str(trial), case.dtype, failure.kind, reason=str(failure))
    return found


def _ask(
    kernel: Kernel,
    run: Run,
    trial: Trial,
    answers: _Answers,
    verdict: Verdict,
    other: int = 0,
    same_memory: bool = False,
) -> tuple[CaseVerdict, list[Tensor]]:
    """One call, judged; and what it returned."""
    args, grad, expected = answers(trial, kernel.differentiable, other)
    outputs, gradients = run(args, grad, layout=trial.layout, same_memory=same_memory)
    name, dtype = str(trial), trial.case.dtype
    values = [e for e in expected if not e.is_gradient]
    if len(outputs) != len(values):
        return CaseVerdict(name, dtype, "wrong", reason=f"returned {len(outputs)} tensors, expected {len(values)}"), []
    if kernel.differentiable and not gradients:
        if kernel.language != "python":
            return CaseVerdict(name, dtype, "wrong", reason="has no gradient"), []
        expected = values
        if FORWARD_ONLY not in verdict.labels:
            verdict.labels.append(FORWARD_ONLY)
    got = [*outputs, *gradients]
    worst = CaseVerdict(name, dtype, "right")
    for tensor, wanted in zip(got, expected, strict=True):
        found = compare(tensor, wanted)
        if isinstance(found, Mismatch):
            return CaseVerdict(name, dtype, "wrong", reason=found.reason), got
        if found.error * worst.budget >= worst.max_error * found.budget:
            worst.max_error, worst.budget = found.error, found.budget
    return worst, got


def _ask_again(
    kernel: Kernel, run: Run, trial: Trial, answers: _Answers, verdict: Verdict, found: CaseVerdict, got: list[Tensor]
) -> CaseVerdict:
    """The same values elsewhere in memory, other values at the same place, and the first ones there once more."""
    for what, other, same_memory in (
        ("asked again", 0, False),
        ("with other values in the same memory", 1, True),
        ("with the first values in that memory again", 0, True),
    ):
        result, now = _ask(kernel, run, trial, answers, verdict, other, same_memory)
        if result.verdict != "right":
            result.reason = f"{what}: {result.reason}"
            return result
        if not other and not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, now, strict=True)):
            spread = max(
                float((a.double() - b.double()).nan_to_num().abs().max()) for a, b in zip(got, now, strict=True)
            )
            label = f"not deterministic: the same inputs gave results up to {spread:.2g} apart"
            if not any(text.startswith("not deterministic") for text in verdict.labels):
                verdict.labels.append(label)
    return found


def _gpu_only(kernel: Kernel) -> str | None:
    if kernel.language == "cuda":
        return "needs a GPU"
    if kernel.builds_per_case:
        return "needs a GPU: compiled for a CPU it would be another program"
    return None


def _cannot_simulate(kernel: Kernel, shapes: tuple[Any, ...]) -> str | None:
    """Why this case cannot be checked without a GPU, if it cannot."""
    if kernel.language == "torch":
        return None
    elements = sum(a.numel() for a in shapes if isinstance(a, Tensor))
    limit = SIMULATED_ELEMENTS[kernel.language]
    return f"more than {limit} elements need a GPU" if elements > limit else None


def _in_process(kernel: Kernel) -> Run:
    place = Inputs()

    def run(
        args: tuple[Any, ...], grad: Tensor | None, layout: str = "contiguous", same_memory: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        return run_kernel(kernel.fn, place.lay_out(args, layout, same_memory), grad)

    return run


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
