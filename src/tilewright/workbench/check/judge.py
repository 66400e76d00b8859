"""Judge one kernel: call it on every case and compare its outputs with the truth."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.errors import first_line
from tilewright.spec import Kernel, Op
from tilewright.workbench.check.budget import Match, Mismatch, compare
from tilewright.workbench.check.cases import PROBLEM_VALUES, CheckCase, element_count
from tilewright.workbench.check.expected import ReferenceFailed, ReferenceRun, ReferenceRuns
from tilewright.worker.execute import OPCHECK, PLAIN, TRACED, Executor, KernelFailed, Reply, Request
from tilewright.worker.memory import GuardedTensor, free_memory, with_layout

# Without a GPU, a case with more input elements than this would take minutes.
SIMULATED_ELEMENTS = {"triton": 2**21, "numba": 1100, "python": 2**21}
OWN_INPUTS_ONLY = "right on the problem's own inputs only"
NOT_RIGHT = ("wrong", "tampered", "crashed", "timeout", OWN_INPUTS_ONLY)
FORWARD_ONLY = "forward only"  # the label of a user's kernel that autograd cannot differentiate
LOWER_PRECISION = 4.0  # times PyTorch's root mean square error
FALLS_BACK = "falls back to torch"
BYTES_PER_ELEMENT = 128  # a rough estimate of the memory that judging takes
MAX_TRACED_ELEMENTS = 2**26  # more take long if their expected outputs are not cached
MIN_RMS_ELEMENTS = 1024  # for a meaningful root mean square
# A user's kernel that passed every case is called a random number of times more: at least MIN_EXTRA_CALLS, and more
# than n times with a probability of MIN_EXTRA_CALLS / n, unless that takes longer than EXTRA_SECONDS.
MIN_EXTRA_CALLS, MAX_EXTRA_CALLS = 32, 4096
EXTRA_SECONDS = 2.0
EXTRA_DRAWS = (0, 1, 4, 5)  # see ReferenceRuns


@dataclass
class CaseVerdict:
    case: str
    dtype: str
    verdict: str  # right, wrong, tampered, crashed, timeout, unsupported
    max_error: float = 0.0
    budget: float = 0.0
    reason: str = ""
    picture: tuple[str, ...] = ()  # a map of the wrong elements, one string per line


@dataclass(repr=False)
class Verdict:
    """The verdict on a kernel, with its evidence. It is true if the kernel is right."""

    op: str
    kernel: str
    verdict: str
    reason: str = ""
    labels: list[str] = field(default_factory=list)
    cases: list[CaseVerdict] = field(default_factory=list)
    isolation: list[str] = field(default_factory=list)  # the sandbox layers that confined a user's file
    seed: int = 0
    file: str = ""  # a user's
    calls: int = 0  # how often the kernel was called

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        passed = sum(case.verdict == "right" for case in self.cases)
        notes = [self.reason] if self.reason else self.labels
        text = f"{self.kernel} is {self.verdict} for {self.op}: {passed} of {len(self.cases)} cases, {self.calls} calls"
        return "; ".join([text, *notes])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Verdict:
        verdict = Verdict(**content)
        verdict.cases = [CaseVerdict(**case) for case in content["cases"]]
        return verdict


@dataclass(frozen=True)
class UserKernel:
    """The kernel in a user's file. Only the Worker that has loaded the file can call it."""

    name: str
    differentiable: bool
    language: str = "python"
    origin: str = "user"
    builds_per_case: bool = False
    is_baseline: bool = False

    @staticmethod
    def fits(*_: object) -> bool:
        return True


class KernelHost(Protocol):
    """A Worker or this process, which runs a kernel."""

    def call(self, request: Request) -> Reply: ...
    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]: ...


class InProcess:
    """Runs a kernel in this process."""

    def __init__(self, fn: Callable[..., Any], device: str):
        self._fn, self._executor = fn, Executor(device)

    def call(self, request: Request) -> Reply:
        return self._executor.execute(self._fn, request)

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        return self._executor.blocks(numbers, size)


class Judge:
    def __init__(
        self,
        op: Op,
        kernel: Kernel | UserKernel,
        host: KernelHost,
        references: ReferenceRuns,
        device: str,
        problem_check: Callable[[Sequence[Any], list[Tensor]], str | None] | None = None,
        requires_gradient: bool = False,
    ):
        """Judge `kernel`, which `host` runs.

        `problem_check` is the check that a third-party problem comes with. With `requires_gradient`, a user's kernel
        without a gradient is wrong, not just labelled.
        """
        self._op, self._kernel, self._host, self._references = op, kernel, host, references
        self._device, self._problem_check, self._requires_gradient = device, problem_check, requires_gradient
        self._verdict = Verdict(op.name, kernel.name, "right", seed=references.seed)
        self._is_users = kernel.origin == "user"
        self._has_gradient: bool | None = None  # None: not known yet
        self._refusal = ""  # why a user's kernel says that it is not available
        self._spread = 0.0
        self._traced, self._fell_back = 0, 0  # cases
        self._precision = (0.0, "")
        self._varied: set[tuple[str, str]] = set()  # cases with other inputs than the problem's own

    def prepare(self, cases: Sequence[CheckCase]) -> None:
        """Compute expected outputs ahead of time if they are small."""
        for case in cases if self._device == "cpu" else ():
            with contextlib.suppress(ReferenceFailed):  # reported when the case is checked
                if not self._unsupported(case):
                    self._references(case, self._wants_gradients(case))

    def judge(self, cases: Sequence[CheckCase], on_case: Callable[[], None]) -> Verdict:
        verdict, selected = self._verdict, list(cases)
        if self._kernel.builds_per_case and len(selected) > 2:
            selected = [selected[0], selected[-1]]
            verdict.labels.append(f"{len(selected)} of {len(cases)} cases, since each is compiled separately")
        # Last come the cases and calls under a dispatch mode: torch.compile gives up on a function that it sees there.
        is_complete = self._judge_cases([case for case in selected if case.mode != OPCHECK], on_case)
        if is_complete:
            self._call_more(selected)
            is_complete = self._judge_cases([case for case in selected if case.mode == OPCHECK], on_case)
        if is_complete:
            self._detect_fallback([c for c in selected if replace(c, rerun=False) == CheckCase(c.case)])
        self._conclude()
        return verdict

    def _judge_cases(self, cases: Sequence[CheckCase], on_case: Callable[[], None]) -> bool:
        """Judge the cases, and return whether to go on: after a crash or a timeout the others would end likewise."""
        for case in cases:
            found = self._judge_case(case)
            on_case()
            if found is None:
                continue
            if any(other.picture for other in self._verdict.cases):
                found.picture = ()  # one is enough
            self._verdict.cases.append(found)
            if case.values in PROBLEM_VALUES:
                self._varied.add((found.case, found.dtype))
            if found.verdict in ("crashed", "timeout", "tampered") or self._refusal:
                return False
        return True

    def _conclude(self) -> None:
        verdict = self._verdict
        bad = [case for case in verdict.cases if case.verdict in NOT_RIGHT]
        skipped = Counter(case.reason for case in verdict.cases if case.verdict == "unsupported")
        if bad:
            verdict.verdict = OWN_INPUTS_ONLY if self._is_right_on_own_inputs(bad) else bad[0].verdict
            verdict.reason = f"{bad[0].case} {bad[0].dtype}: {bad[0].reason}".strip()
        elif self._refusal or not any(case.verdict == "right" for case in verdict.cases):
            verdict.verdict, verdict.reason = "unsupported", self._refusal or "; ".join(skipped)
        else:
            verdict.labels += [f"{count} left out: {reason}" for reason, count in skipped.items()]
        if self._problem_check and (value := self._references.constant_output()) is not None:
            verdict.labels.append(f"the problem's reference always returns {value}, whatever its inputs are")
        if self._spread:
            verdict.labels.append(f"not deterministic: the same inputs gave results up to {self._spread:.2g} apart")
        if self._fell_back:
            some = self._fell_back < self._traced
            part = f" in {self._fell_back} of {self._traced} cases" if some else ""
            verdict.labels.append(f"{FALLS_BACK}{part}")
        if self._precision[0] > LOWER_PRECISION:
            ratio, where = self._precision
            verdict.labels.append(f"lower precision: errors up to {ratio:.1f} times those of torch ({where})")

    def _is_right_on_own_inputs(self, bad: Sequence[CaseVerdict]) -> bool:
        varied = all((case.case, case.dtype) in self._varied for case in bad)
        return varied and all(case.verdict in ("wrong", "crashed") for case in bad)

    def _judge_case(self, case: CheckCase) -> CaseVerdict | None:
        """Return None if there is nothing to check."""
        name, dtype = str(case), case.case.dtype
        needs_gradient = case.grad_only_of is not None or case.no_grad_output is not None
        if needs_gradient and self._has_gradient is False:
            return None
        if reason := self._unsupported(case):
            return CaseVerdict(name, dtype, "unsupported", reason=reason)
        try:
            if case.mode == OPCHECK:
                return self._opcheck(case)
            if case.repeat > 1:
                return self._check_repeated(case)
            found, got = self._check_call(case)
            if case.rerun and found.verdict == "right":
                found = self._check_reruns(case, found, got)
            return found
        except KernelFailed as failure:
            if failure.kind == "unsupported" and self._is_users and case.mode == PLAIN:
                self._refusal = str(failure)
            kind = "unsupported" if failure.kind == "memory" else failure.kind
            return CaseVerdict(name, dtype, kind, reason=str(failure))
        except ReferenceFailed as failure:
            if case.values in PROBLEM_VALUES:
                return None
            return CaseVerdict(name, dtype, "unsupported", reason=f"the reference does not accept it ({failure})")
        except torch.cuda.OutOfMemoryError:
            free, words = free_memory()
            fitting = free // BYTES_PER_ELEMENT
            reason = f"the case and its float64 truth do not fit in {words}; about {fitting} elements would"
            return CaseVerdict(name, dtype, "unsupported", reason=reason)
        finally:
            self._references.evict_large()

    def _call(self, request: Request) -> Reply:
        self._verdict.calls += 1
        return self._host.call(request)

    def _check_call(
        self, case: CheckCase, draw: int = 0, *, gradients: bool = True, **options: Any
    ) -> tuple[CaseVerdict, list[Tensor]]:
        """Judge one call, and return its outputs too."""
        run = self._references(case, gradients and self._wants_gradients(case), draw)
        if self._kernel.builds_per_case:  # instrumentation would also watch its compiler
            options["instrumented"] = False
        request = self._references.request(case, run, **options)
        reply = self._call(request)
        found, got = self._compare(case, run, reply)
        if found.verdict == "right":
            found = self._check_memory(run, request, reply) or found
        found.case, found.dtype = str(case), case.case.dtype
        if case.values not in PROBLEM_VALUES and len(reply.outputs) == len(request.output_specs):
            self._ask_problem_check(found, run, reply.outputs)
        return found, got

    def _wants_gradients(self, case: CheckCase) -> bool:
        """Return whether gradients are compared: not for inputs far from zero, where they are lost in cancellation."""
        return self._kernel.differentiable and self._has_gradient is not False and case.values != "shifted"

    def _ask_problem_check(self, found: CaseVerdict, run: ReferenceRun, outputs: list[Tensor]) -> None:
        if self._problem_check is None:
            return
        try:
            objection = self._problem_check(run.args, [o.to(self._device) for o in outputs])
        except Exception as error:  # third-party code may raise anything
            objection = f"it raises {first_line(error)}"
        if found.verdict == "right" and objection:
            label = f"the problem's own check rejects it: {objection}"
            self._verdict.labels += [label] if label not in self._verdict.labels else []
        elif found.verdict == "wrong" and not objection:
            found.reason += "; the problem's own check accepts it"

    def _compare(self, case: CheckCase, run: ReferenceRun, reply: Reply) -> tuple[CaseVerdict, list[Tensor]]:
        wrong = CaseVerdict("", "", "wrong")
        expected = [e for e in run.expected if not e.is_gradient]
        if len(reply.outputs) != len(expected):
            wrong.reason = f"returned {len(reply.outputs)} tensors, expected {len(expected)}"
            return wrong, []
        pairs = [*zip(reply.outputs, expected, strict=True)]
        if run.grads and not reply.gradients:
            if reason := self._lost_gradient(reply):
                wrong.reason = reason
                return wrong, []
        elif run.grads:
            self._has_gradient = True
            expected = [e for e in run.expected if e.is_gradient]
            if len(expected) != len(reply.gradients):
                wrong.reason = f"returned {len(reply.gradients)} gradients, expected {len(expected)}"
                return wrong, []
            for gradient, wanted in zip(reply.gradients, expected, strict=True):
                if gradient is not None:
                    pairs.append((gradient, wanted))
                elif wanted.truth.any():
                    wrong.reason = f"{wanted.name} is None"
                    return wrong, []
        got = [tensor.clone() for tensor, _ in pairs]
        worst = CaseVerdict("", "", "right")
        for tensor, wanted in zip(got, (wanted for _, wanted in pairs), strict=True):
            match = compare(tensor, wanted)
            if isinstance(match, Mismatch):
                wrong.reason, wrong.picture = match.reason, match.picture
                return wrong, got
            if case.values == "normal":
                self._note_precision(match, tensor, f"{wanted.name}, {case} {case.case.dtype}")
            _keep_worst(worst, match)
        return worst, got

    def _lost_gradient(self, reply: Reply) -> str | None:
        """Return why a missing gradient is wrong, or label a user's kernel as forward only and return None."""
        why = f" ({reply.forward_only})" if reply.forward_only else ""
        if self._has_gradient:
            return f"has no gradient here{why}"
        if not self._is_users or self._requires_gradient:
            return f"has no gradient{why}"
        self._has_gradient = False
        self._verdict.labels.append(FORWARD_ONLY)
        if why:
            self._verdict.labels.append(f"fails if its inputs require a gradient{why}")
        return None

    def _check_memory(self, run: ReferenceRun, request: Request, reply: Reply) -> CaseVerdict | None:
        """Return a verdict if an input or the memory around it was changed."""
        numbers = [number for number, a in enumerate(request.args) if isinstance(a, GuardedTensor)]
        may_change = self._op.mutates(*run.args)
        if len(reply.memory) != len(numbers):
            return CaseVerdict("", "", "tampered", reason="did not return its inputs")
        for number, after in zip(numbers, reply.memory, strict=True):
            before: GuardedTensor = request.args[number]
            after = after.to(before.memory.device)
            if what := before.difference(after, may_change=number in may_change):
                return CaseVerdict("", "", "wrong", reason=f"its argument {number + 1} {what}")
        return None

    def _check_reruns(self, case: CheckCase, found: CaseVerdict, got: list[Tensor]) -> CaseVerdict:
        for what, draw, options in (
            ("called again", 0, {}),
            ("with other values in the same memory", 1, {"reuse_memory": True}),
            ("with the first values in that memory again", 0, {"reuse_memory": True}),
            ("with the same values in another order", 2, {}),
            ("not instrumented, without gradients", 3, {"instrumented": False, "gradients": False}),
        ):
            result, now = self._check_call(case, draw, **options)
            if result.verdict != "right":
                result.reason = f"{what}: {result.reason}"
                return result
            if not draw:
                differences = [(a.double() - b.double()).nan_to_num().abs() for a, b in zip(got, now, strict=True)]
                self._spread = max(self._spread, *(float(d.max()) if d.numel() else 0.0 for d in differences))
        return found

    def _call_more(self, cases: Sequence[CheckCase]) -> None:
        """Call a user's kernel more often, to catch one that is honest in its first calls only.

        The number of calls has a long tail, so that no number of honest calls is safe.
        """
        judged = {(case.case, case.dtype): case.verdict for case in self._verdict.cases}
        rerun = [case for case in cases if case.rerun and judged.get((str(case), case.case.dtype)) == "right"]
        if not self._is_users or not rerun or any(verdict in NOT_RIGHT for verdict in judged.values()):
            return
        generator, case = random.SystemRandom(), rerun[-1]
        count = min(MAX_EXTRA_CALLS, int(MIN_EXTRA_CALLS / (1 - generator.random())))
        deadline = time.monotonic() + EXTRA_SECONDS
        known: dict[int, list[Tensor]] = {}
        for number in range(count):
            if number >= MIN_EXTRA_CALLS and time.monotonic() > deadline:
                return
            try:
                found = self._check_extra_call(case, generator.choice(EXTRA_DRAWS), known)
            except KernelFailed as failure:
                found = CaseVerdict("", "", failure.kind, reason=str(failure))
            except (ReferenceFailed, torch.cuda.OutOfMemoryError):
                return
            if found.verdict in NOT_RIGHT:
                found.case, found.dtype = str(case), case.case.dtype
                found.reason = f"in call {self._verdict.calls}: {found.reason}"
                self._verdict.cases.append(found)
                return

    def _check_extra_call(self, case: CheckCase, draw: int, known: dict[int, list[Tensor]]) -> CaseVerdict:
        """Judge a call as in production: not instrumented and without gradients."""
        run = self._references(case, False, draw)
        reply = self._call(self._references.request(case, run, instrumented=False))
        if draw in known and all(map(_equal, reply.outputs, known[draw])):
            return CaseVerdict("", "", "right")
        found, known[draw] = self._compare(case, run, reply)
        return found

    def _detect_fallback(self, cases: Sequence[CheckCase]) -> None:
        """Count the cases in which torch operators do the reference's work."""
        for case in cases if self._kernel.language != "torch" else ():
            too_large = self._references.evicts_large and element_count(self._op, case.case) > MAX_TRACED_ELEMENTS
            if too_large or self._unsupported(case):
                continue
            # The verdict is settled: failures do not matter any more.
            with contextlib.suppress(KernelFailed, ReferenceFailed, torch.cuda.OutOfMemoryError):
                run = self._references(case, self._wants_gradients(case))
                reply = self._call(self._references.request(replace(case, mode=TRACED), run))
                self._traced += 1
                self._fell_back += bool(run.torch_calls) and not run.torch_calls - Counter(reply.calls)

    def _opcheck(self, case: CheckCase) -> CaseVerdict | None:
        run = self._references(case, self._wants_gradients(case))
        reply = self._call(self._references.request(case, run))
        return CaseVerdict(str(case), case.case.dtype, "right") if reply.calls else None

    def _check_repeated(self, case: CheckCase) -> CaseVerdict:
        """Check more elements than an int32 can index: the case is repeated, and its truth serves for every part."""
        run = self._references(case, with_gradients=False)
        request = self._references.request(case, run)
        self._call(request)
        boundary = 2**31 // run.args[request.repeated[0]].numel()
        numbers = {0, *(min(n, case.repeat - 1) for n in (boundary - 1, boundary, boundary + 1, case.repeat))}
        numbers |= {random.SystemRandom().randrange(case.repeat) for _ in range(27)}
        found = CaseVerdict(str(case), case.case.dtype, "right")
        expected = run.expected
        size = expected[0].truth.shape[0]
        for number, block in zip(sorted(numbers), self._host.blocks(sorted(numbers), size), strict=True):
            for tensor, wanted in zip(block, expected, strict=True):
                match = compare(tensor, wanted)
                if isinstance(match, Mismatch):
                    found.verdict, found.reason = "wrong", f"in repetition {number}: {match.reason}"
                    return found
                _keep_worst(found, match)
        return found

    def _note_precision(self, match: Match, tensor: Tensor, where: str) -> None:
        if tensor.numel() >= MIN_RMS_ELEMENTS and match.relative_to_torch > self._precision[0]:
            self._precision = (match.relative_to_torch, where)

    def _unsupported(self, case: CheckCase) -> str | None:
        """Return why this case cannot be checked, or None."""
        shapes = self._op.make(case.case, device="meta")
        args = [with_layout(a, case.layout) if isinstance(a, Tensor) else a for a in shapes]
        for number in self._references.repeated(case):
            args[number] = args[number].new_empty(case.repeat * args[number].shape[0], *args[number].shape[1:])
        if not self._kernel.fits(*args):
            return "the kernel does not support such a case"
        if self._device != "cpu" or self._kernel.language == "torch":
            return None
        elements = sum(a.numel() for a in shapes if isinstance(a, Tensor))
        limit = SIMULATED_ELEMENTS[self._kernel.language]
        if elements <= limit:
            return None
        return f"more than {limit} elements need a GPU; {-(-elements // limit)} times smaller would do"


def _keep_worst(verdict: CaseVerdict, match: Match) -> None:
    if match.error * verdict.budget >= verdict.max_error * match.budget:
        verdict.max_error, verdict.budget = match.error, match.budget


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.to(other.device), other)
