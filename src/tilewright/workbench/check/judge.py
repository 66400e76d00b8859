"""One kernel before its judge: every trial asked, every answer held against the truth."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.errors import first_line
from tilewright.spec import Kernel, Op
from tilewright.workbench.check.budget import Match, Mismatch, compare
from tilewright.workbench.check.cases import Trial, elements
from tilewright.workbench.check.expected import Answer, Answers, ReferenceFailed
from tilewright.worker.execute import OPERATORS, PLAIN, SEEN, KernelFailed, Reply, Request, Stage
from tilewright.worker.memory import Placed, free_memory, laid_out

# Without a GPU a case larger than this would take minutes; its elements, all inputs together.
SIMULATED_ELEMENTS = {"triton": 2**21, "numba": 1100, "python": 2**21}
NOT_RIGHT = ("wrong", "tampered", "crashed", "timeout")
FORWARD_ONLY = "forward only"  # the label of a user's kernel that torch cannot differentiate
LOWER = 4.0  # times torch's own error, root mean square, from which on a right kernel is said to be less precise
FALLS_BACK = "falls back to torch"
ROOM = 128  # bytes of memory that judging takes for each element, about
SEEN_THROUGH = 2**26  # elements of a case at most, where truths are forgotten: those of larger ones take long
MANY = 1024  # elements that make a root mean square tell something


@dataclass
class CaseVerdict:
    case: str
    dtype: str
    verdict: str  # right, wrong, tampered, crashed, timeout, unsupported
    max_error: float = 0.0
    budget: float = 0.0
    reason: str = ""
    picture: tuple[str, ...] = ()  # where it is wrong, a line each


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
    file: str = ""  # a user's

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Verdict:
        made = Verdict(**content)
        made.cases = [CaseVerdict(**case) for case in content["cases"]]
        return made


class Performer(Protocol):
    """Where a kernel runs: a Worker, or this process."""

    def call(self, request: Request) -> Reply: ...
    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]: ...


class Here:
    """A kernel in this process."""

    def __init__(self, fn: Callable[..., Any], device: str):
        self._fn, self._stage = fn, Stage(device)

    def call(self, request: Request) -> Reply:
        return self._stage.perform(self._fn, request)

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        return self._stage.blocks(numbers, size)


class Judge:
    def __init__(
        self,
        op: Op,
        kernel: Kernel,
        performer: Performer,
        answers: Answers,
        device: str,
        theirs: Callable[[Sequence[Any], list[Tensor]], str | None] | None = None,
    ):
        """`theirs`: the check that a foreign problem brings along."""
        self._op, self._kernel, self._performer, self._answers = op, kernel, performer, answers
        self._device, self._theirs = device, theirs
        self._verdict = Verdict(op.name, kernel.name, "right", seed=answers.seed)
        self._is_users = kernel.language == "python"
        self._refusal = ""  # what a user's kernel says it cannot do
        self._spread = 0.0
        self._seen_through, self._fell_back = 0, 0  # cases
        self._precision = (0.0, "")

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Work out the answers beforehand, where they are small."""
        for trial in trials if self._device == "cpu" else ():
            with contextlib.suppress(ReferenceFailed):  # which is told when the trial is asked
                if not self._cannot(trial):
                    self._answers(trial, self._asks_gradients(trial))

    def judge(self, trials: Sequence[Trial], on_case: Callable[[], None]) -> Verdict:
        verdict, todo = self._verdict, list(trials)
        if self._kernel.builds_per_case and len(todo) > 2:
            todo = [todo[0], todo[-1]]
            verdict.labels.append(f"{len(todo)} of {len(trials)} cases, since each is compiled anew")
        for trial in todo:
            found = self._trial(trial)
            on_case()
            if found is None:
                continue
            if any(case.picture for case in verdict.cases):
                found.picture = ()  # one tells enough
            verdict.cases.append(found)
            if found.verdict in ("crashed", "timeout", "tampered") or self._refusal:
                break  # the rest would end the same way, only later
        else:
            self._see_through([t for t in todo if replace(t, again=False) == Trial(t.case)])
        self._conclude()
        return verdict

    def _conclude(self) -> None:
        verdict = self._verdict
        bad = [case for case in verdict.cases if case.verdict in NOT_RIGHT]
        skipped = Counter(case.reason for case in verdict.cases if case.verdict == "unsupported")
        if bad:
            verdict.verdict = bad[0].verdict
            verdict.reason = f"{bad[0].case} {bad[0].dtype}: {bad[0].reason}".strip()
        elif self._refusal or not any(case.verdict == "right" for case in verdict.cases):
            verdict.verdict, verdict.reason = "unsupported", self._refusal or "; ".join(skipped)
        else:
            verdict.labels += [f"{count} left out: {reason}" for reason, count in skipped.items()]
        if self._spread:
            verdict.labels.append(f"not deterministic: the same inputs gave results up to {self._spread:.2g} apart")
        if self._fell_back:
            some = self._fell_back < self._seen_through
            part = f" in {self._fell_back} of {self._seen_through} cases" if some else ""
            verdict.labels.append(f"{FALLS_BACK}{part}")
        if self._precision[0] > LOWER:
            ratio, where = self._precision
            verdict.labels.append(f"lower precision: errors up to {ratio:.1f} times those of torch ({where})")

    def _trial(self, trial: Trial) -> CaseVerdict | None:
        """None: there was nothing to ask."""
        name, dtype = str(trial), trial.case.dtype
        if reason := self._cannot(trial):
            return CaseVerdict(name, dtype, "unsupported", reason=reason)
        try:
            if trial.how == OPERATORS:
                return self._operators(trial)
            if trial.repeat > 1:
                return self._long(trial)
            found, got = self._ask(trial)
            if trial.again and found.verdict == "right":
                found = self._ask_again(trial, found, got)
            return found
        except KernelFailed as failure:
            if failure.kind == "unsupported" and self._is_users and trial.how == PLAIN:
                self._refusal = str(failure)
            kind = "unsupported" if failure.kind == "memory" else failure.kind
            return CaseVerdict(name, dtype, kind, reason=str(failure))
        except ReferenceFailed as failure:
            return CaseVerdict(name, dtype, "unsupported", reason=f"the reference does not take it ({failure})")
        except torch.cuda.OutOfMemoryError:
            free, words = free_memory()
            reason = f"the case and its float64 truth do not fit in {words}; about {free // ROOM} elements would"
            return CaseVerdict(name, dtype, "unsupported", reason=reason)
        finally:
            self._answers.forget()

    def _ask(
        self, trial: Trial, other: int = 0, *, gradients: bool = True, **more: Any
    ) -> tuple[CaseVerdict, list[Tensor]]:
        """One call, judged; and what it returned."""
        answer = self._answers(trial, gradients and self._asks_gradients(trial), other)
        if self._kernel.builds_per_case:  # else what its compiler does would be watched
            more["watched"] = False
        request = self._answers.request(trial, answer, **more)
        reply = self._performer.call(request)
        name, dtype = str(trial), trial.case.dtype
        found, got = self._compare(trial, answer, reply)
        if found.verdict == "right":
            found = self._untouched(answer, request, reply) or found
        found.case, found.dtype = name, dtype
        if self._theirs and len(reply.outputs) == len(request.wanted):
            self._hold_against_theirs(found, answer, reply.outputs)
        return found, got

    def _asks_gradients(self, trial: Trial) -> bool:
        """Not far from zero, where what cancels in a gradient is honestly larger than the gradient."""
        return self._kernel.differentiable and trial.values != "shifted"

    def _hold_against_theirs(self, found: CaseVerdict, answer: Answer, outputs: list[Tensor]) -> None:
        assert self._theirs is not None
        try:
            against = self._theirs(answer.args, [o.to(self._device) for o in outputs])
        except Exception as error:  # whatever a stranger's check does
            against = f"it fails itself, {first_line(error)}"
        if found.verdict == "right" and against:
            label = f"the problem's own check refuses it: {against}"
            self._verdict.labels += [label] if label not in self._verdict.labels else []
        elif found.verdict == "wrong" and not against:
            found.reason += "; the problem's own check accepts it"

    def _compare(self, trial: Trial, answer: Answer, reply: Reply) -> tuple[CaseVerdict, list[Tensor]]:
        wrong = CaseVerdict("", "", "wrong")
        expected = [e for e in answer.expected if not e.is_gradient]
        if len(reply.outputs) != len(expected):
            wrong.reason = f"returned {len(reply.outputs)} tensors, expected {len(expected)}"
            return wrong, []
        pairs = [*zip(reply.outputs, expected, strict=True)]
        if answer.grads and not reply.gradients:
            if not self._is_users or (trial.only is not None and FORWARD_ONLY not in self._verdict.labels):
                wrong.reason = "has no gradient" + (" here" if trial.only is not None else "")
                return wrong, []
            if FORWARD_ONLY not in self._verdict.labels:
                self._verdict.labels.append(FORWARD_ONLY)
        elif answer.grads:
            slopes = [e for e in answer.expected if e.is_gradient]
            if len(slopes) != len(reply.gradients):
                wrong.reason = f"returned {len(reply.gradients)} gradients, expected {len(slopes)}"
                return wrong, []
            for gradient, wanted in zip(reply.gradients, slopes, strict=True):
                if gradient is not None:
                    pairs.append((gradient, wanted))
                elif wanted.truth.any():
                    wrong.reason = f"{wanted.what} is None"
                    return wrong, []
        got = [tensor.clone() for tensor, _ in pairs]
        worst = CaseVerdict("", "", "right")
        for tensor, wanted in zip(got, (wanted for _, wanted in pairs), strict=True):
            match = compare(tensor, wanted)
            if isinstance(match, Mismatch):
                wrong.reason, wrong.picture = match.reason, match.picture
                return wrong, got
            if trial.values == "normal":
                self._note_precision(match, tensor, f"{wanted.what}, {trial} {trial.case.dtype}")
            if match.error * worst.budget >= worst.max_error * match.budget:
                worst.max_error, worst.budget = match.error, match.budget
        return worst, got

    def _untouched(self, answer: Answer, request: Request, reply: Reply) -> CaseVerdict | None:
        """Inputs as they were, and nothing written around them."""
        numbers = [number for number, a in enumerate(request.args) if isinstance(a, Placed)]
        may_change = self._op.mutates(*answer.args)
        if len(reply.memory) != len(numbers):
            return CaseVerdict("", "", "tampered", reason="did not give its inputs back")
        for number, after in zip(numbers, reply.memory, strict=True):
            before: Placed = request.args[number]
            after = after.to(before.memory.device)
            if what := before.difference(after, may_change=number in may_change):
                return CaseVerdict("", "", "wrong", reason=f"its argument {number + 1} {what}")
        return None

    def _ask_again(self, trial: Trial, found: CaseVerdict, got: list[Tensor]) -> CaseVerdict:
        for what, other, more in (
            ("asked again", 0, {}),
            ("with other values in the same memory", 1, {"same_memory": True}),
            ("with the first values in that memory again", 0, {"same_memory": True}),
            ("with the same values in another order", 2, {}),
            ("unwatched, without gradients", 3, {"watched": False, "gradients": False}),
        ):
            result, now = self._ask(trial, other, **more)
            if result.verdict != "right":
                result.reason = f"{what}: {result.reason}"
                return result
            if not other:
                apart = [(a.double() - b.double()).nan_to_num().abs() for a, b in zip(got, now, strict=True)]
                self._spread = max(self._spread, *(float(a.max()) if a.numel() else 0.0 for a in apart))
        return found

    def _see_through(self, trials: Sequence[Trial]) -> None:
        """Is its work done by the operators of torch that do the reference's? Asked last: looking may change what is
        looked at, as torch.compile gives up on a function that it has met under a mode."""
        for trial in trials if self._kernel.language != "torch" else ():
            if self._cannot(trial) or (self._answers.forgets and elements(self._op, trial.case) > SEEN_THROUGH):
                continue
            with contextlib.suppress(KernelFailed, ReferenceFailed, torch.cuda.OutOfMemoryError):  # all has been told
                answer = self._answers(trial, self._kernel.differentiable)
                reply = self._performer.call(self._answers.request(replace(trial, how=SEEN), answer))
                self._seen_through += 1
                self._fell_back += bool(answer.work) and not answer.work - Counter(reply.calls)

    def _operators(self, trial: Trial) -> CaseVerdict | None:
        answer = self._answers(trial, self._kernel.differentiable)
        reply = self._performer.call(self._answers.request(trial, answer))
        return CaseVerdict(str(trial), trial.case.dtype, "right") if reply.calls else None

    def _long(self, trial: Trial) -> CaseVerdict:
        """More elements than an int32 can count: the case over and over, so that its truth serves for every part."""
        answer = self._answers(trial, with_gradients=False)
        request = self._answers.request(trial, answer)
        self._performer.call(request)
        boundary = 2**31 // answer.args[request.repeated[0]].numel()
        numbers = {0, *(min(n, trial.repeat - 1) for n in (boundary - 1, boundary, boundary + 1, trial.repeat))}
        numbers |= {random.SystemRandom().randrange(trial.repeat) for _ in range(27)}
        found = CaseVerdict(str(trial), trial.case.dtype, "right")
        expected = answer.expected
        size = expected[0].truth.shape[0]
        for number, block in zip(sorted(numbers), self._performer.blocks(sorted(numbers), size), strict=True):
            for tensor, wanted in zip(block, expected, strict=True):
                match = compare(tensor, wanted)
                if isinstance(match, Mismatch):
                    found.verdict, found.reason = "wrong", f"in repetition {number}: {match.reason}"
                    return found
                if match.error * found.budget >= found.max_error * match.budget:
                    found.max_error, found.budget = match.error, match.budget
        return found

    def _note_precision(self, match: Match, tensor: Tensor, where: str) -> None:
        if tensor.numel() >= MANY and match.against_torch > self._precision[0]:
            self._precision = (match.against_torch, where)

    def _cannot(self, trial: Trial) -> str | None:
        """Why this trial cannot be asked, if it cannot."""
        shapes = self._op.make(trial.case, device="meta")
        laid = [laid_out(a, trial.layout) if isinstance(a, Tensor) else a for a in shapes]
        for number in self._answers.repeated(trial):
            laid[number] = laid[number].new_empty(trial.repeat * laid[number].shape[0], *laid[number].shape[1:])
        if not self._kernel.fits(*laid):
            return "the kernel does not take such a case"
        if self._device != "cpu" or self._kernel.language == "torch":
            return None
        elements = sum(a.numel() for a in shapes if isinstance(a, Tensor))
        limit = SIMULATED_ELEMENTS[self._kernel.language]
        if elements <= limit:
            return None
        return f"more than {limit} elements need a GPU; {-(-elements // limit)} times smaller would do"
