"""Judge one kernel: call it on every case and compare its outputs with the truth."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.errors import GPUUnusable, first_line
from tilewright.spec import Case, Kernel, Op
from tilewright.variants import PROBLEM_VALUES
from tilewright.workbench.check.budget import (
    ExpectedTensor,
    Match,
    Mismatch,
    compare,
    largest_difference,
    shows_nothing,
)
from tilewright.workbench.check.cases import CPU_ELEMENTS, CheckCase, element_count, is_plain
from tilewright.workbench.check.expected import (
    ANOTHER,
    FIRST,
    HALF_REPLACED,
    ONE_REPLACED,
    OTHER,
    REORDERED,
    ReferenceFailed,
    ReferenceRun,
    ReferenceRuns,
)
from tilewright.workbench.check.operators import operator_name
from tilewright.worker.execute import COMPILED, OPCHECK, PLAIN, TRACED, Executor, KernelFailed, Reply, Request, flatten
from tilewright.worker.memory import GuardedTensor, free_memory, with_layout

# The limits without a GPU.
SIMULATED_ELEMENTS = {"triton": CPU_ELEMENTS, "gluon": CPU_ELEMENTS, "numba": 1100, "python": CPU_ELEMENTS}
OWN_INPUTS_ONLY = "right on the problem's own inputs only"
NOT_RIGHT = ("wrong", "tampered", "crashed", "timeout", OWN_INPUTS_ONLY)
FORWARD_ONLY = "forward only"  # the label of a user's kernel that autograd cannot differentiate
DECLINES = "the kernel does not take such a case"
MAX_CRASHES = 8  # cases that end with a crash before the others are left out
LOWER_PRECISION = 4.0  # times PyTorch's root mean square error
FALLS_BACK = "falls back to torch"
FORWARD_WHERE_LARGE = "without gradients where they do not fit into memory"
BYTES_PER_ELEMENT = 128  # a rough estimate of the memory that judging takes
MAX_TRACED_ELEMENTS = 2**26  # more take long if their expected outputs are not cached
MIN_RMS_ELEMENTS = 1024  # for a meaningful root mean square
# A user's kernel that passed every case is called a random number of times more with each case of `_rerun`: more than
# n times with a probability of MIN_EXTRA_CALLS / n, unless all together takes longer than EXTRA_SECONDS; in total at
# least MIN_EXTRA_CALLS.
MIN_EXTRA_CALLS, MAX_EXTRA_CALLS = 32, 4096
EXTRA_SECONDS = 2.0
LARGE_ELEMENTS, LARGE_EXTRA_CALLS = 2**27, 8  # a case with more elements gets fewer more calls
EXTRA_DRAWS = (FIRST, OTHER, ONE_REPLACED, HALF_REPLACED)
WITH_GRADIENTS, REUSED = 0.5, 0.5  # shares of these calls: with gradients, and in the tensors of the call before


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

    @property
    def summary(self) -> str:
        """The verdict, with the number of cases if some were left out."""
        left_out = [c for c in self.cases if c.verdict == "unsupported" and f"({COMPILED})" not in c.case]
        if not self.right or not left_out:
            return self.verdict
        return f"right in {sum(c.verdict == 'right' for c in self.cases)} of {len(self.cases)} cases"

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
        # Not an operation of ours: somebody else draws its inputs.
        self._is_others = problem_check is not None or op.file is not None or not op.is_varied
        self._has_gradient: bool | None = None  # None: not known yet
        self._refusal = ""  # why a user's kernel says that it is not available
        self._spread = 0.0
        self._traced, self._fell_back = 0, 0  # cases
        self._precision = (0.0, "")
        self._shared: list[str] = []  # outputs that share memory where those of the reference do not
        self._rerun: list[CheckCase] = []  # right when called again
        self._declined: list[CheckCase] = []
        self._taken: set[tuple[Case, str]] = set()  # with their layouts
        self._varied: set[tuple[str, str]] = set()  # cases with other inputs than the problem's own
        self._empty_comparisons: Counter[str | None] = Counter()  # why outputs on normal values prove nothing

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
            self._call_more()
            is_complete = self._judge_cases([case for case in selected if case.mode == OPCHECK], on_case)
        if is_complete:
            self._detect_fallback([case for case in selected if is_plain(case)])
        self._conclude()
        return verdict

    def _judge_cases(self, cases: Sequence[CheckCase], on_case: Callable[[], None]) -> bool:
        """Judge the cases, and return whether to go on: after a timeout or many crashes, the others would fail too."""
        for case in self._without_declined(cases):
            found = self._judge_on_gpu(case)
            on_case()
            if found is None:
                continue
            if found.verdict == "right" and case.rerun:
                self._rerun.append(case)
            if found.reason.startswith(DECLINES) and is_plain(case):
                self._declined.append(case)
            if any(other.picture for other in self._verdict.cases):
                found.picture = ()  # one is enough
            self._verdict.cases.append(found)
            if self._is_others and case.values in PROBLEM_VALUES:
                self._varied.add((found.case, found.dtype))
            crashes = sum(other.verdict == "crashed" for other in self._verdict.cases)
            if found.verdict in ("timeout", "tampered") or crashes == MAX_CRASHES or self._refusal:
                return False
        return True

    def _without_declined(self, cases: Sequence[CheckCase]) -> Iterator[CheckCase]:
        """Yield the cases; variants of a case that the kernel declined are replaced by those of one that it takes.

        Otherwise a kernel could decline the case on which it would be found out.
        """
        for case in cases:
            declined = next((one for one in self._declined if one.case == case.case), None)
            if declined is None or is_plain(case):
                yield case
                continue
            instead = self._taken_instead(case.case)
            if instead is None:
                yield case
                continue
            if declined.rerun:
                self._declined[self._declined.index(declined)] = replace(declined, rerun=False)
                yield CheckCase(instead, rerun=True)
            yield replace(case, case=instead)

    def _taken_instead(self, declined: Case) -> Case | None:
        """Return the largest case that the kernel takes and that is no larger than this one; or else the smallest."""
        taken = [one for one, layout in self._taken if one.dtype == declined.dtype and layout == "contiguous"]
        sizes = {one: element_count(self._op, one) for one in taken}
        fitting = [one for one in taken if sizes[one] <= element_count(self._op, declined)]
        return max(fitting, key=sizes.__getitem__) if fitting else min(taken, key=sizes.__getitem__, default=None)

    def _conclude(self) -> None:
        verdict = self._verdict
        bad = [case for case in verdict.cases if case.verdict in NOT_RIGHT]
        left_out = [case.reason for case in verdict.cases if case.verdict == "unsupported"]
        skipped = Counter(DECLINES if reason.startswith(DECLINES) else reason for reason in left_out)
        right_on_own_inputs = not bad or self._is_right_on_own_inputs(bad)
        if right_on_own_inputs and self._empty_comparisons and None not in self._empty_comparisons:
            why = self._empty_comparisons.most_common(1)[0][0]
            verdict.verdict, verdict.reason = "unsupported", f"the reference {why}, so that nothing can be compared"
        elif bad:
            verdict.verdict = OWN_INPUTS_ONLY if right_on_own_inputs else bad[0].verdict
            verdict.reason = f"{bad[0].case} {bad[0].dtype}: {bad[0].reason}".strip()
            others = Counter(case.verdict for case in bad if case.verdict != bad[0].verdict)
            words = [f"; {count} other case{'s' * (count > 1)}: {kind}" for kind, count in others.items()]
            verdict.reason += "".join(words)
        elif self._refusal or not any(case.verdict == "right" for case in verdict.cases):
            verdict.verdict, verdict.reason = "unsupported", self._refusal or "; ".join(dict.fromkeys(left_out))
        else:
            verdict.labels += [f"{count} left out: {reason}" for reason, count in skipped.items()]
        if self._is_others and (value := self._references.constant_output()) is not None:
            whose = "the problem's reference" if self._problem_check else "the reference"
            verdict.labels.append(f"{whose} always returns {value}, whatever its inputs are")
        if self._is_others and (constant := self._references.constant_inputs()):
            verdict.labels.append(f"not told from constants: {', '.join(constant)}")
        if self._spread:
            verdict.labels.append(f"not deterministic: the same inputs gave results up to {self._spread:.2g} apart")
        if self._shared and self._is_users:
            verdict.labels.append(f"shares memory where the reference does not: {', '.join(self._shared)}")
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

    def _judge_on_gpu(self, case: CheckCase) -> CaseVerdict | None:
        """Judge a case, and name it if it leaves the GPU unusable: no later case could be judged."""
        try:
            found = self._judge_case(case)
            if self._device != "cpu":
                torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            raise GPUUnusable(f"{self._kernel.name} or the reference on {case}", first_line(error)) from None
        return found

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
            elif found.verdict == "right" and self._has_a_path_without_gradients(case):
                found, _ = self._check_call(case, gradients=False)
                found.reason = found.reason and f"without gradients: {found.reason}"
            return found
        except KernelFailed as failure:
            if failure.kind == "unsupported" and self._is_users and case.mode == PLAIN:
                self._refusal = str(failure)
            return self._failed(case, failure)
        except ReferenceFailed as failure:
            if case.values in PROBLEM_VALUES:
                return None
            return CaseVerdict(name, dtype, "unsupported", reason=f"the reference does not accept it ({failure})")
        except torch.cuda.OutOfMemoryError:
            return self._check_too_large(case)

    def _check_too_large(self, case: CheckCase) -> CaseVerdict:
        """Judge a case whose expected outputs do not fit into memory: without gradients, if that is enough."""
        try:
            if is_plain(case) and self._wants_gradients(case):
                found, _ = self._check_call(case, gradients=False)
                self._verdict.labels += [FORWARD_WHERE_LARGE] if FORWARD_WHERE_LARGE not in self._verdict.labels else []
                return found
        except KernelFailed as failure:
            return self._failed(case, failure)
        except torch.cuda.OutOfMemoryError:
            pass
        free, words = free_memory()
        fitting = free // BYTES_PER_ELEMENT
        reason = f"the case and its float64 truth do not fit in {words}; about {fitting} elements would"
        return CaseVerdict(str(case), case.case.dtype, "unsupported", reason=reason)

    def _failed(self, case: CheckCase, failure: KernelFailed) -> CaseVerdict:
        """Return the verdict on a case without outputs.

        A user's kernel may decline a case by its shapes, dtypes and layouts, not by its values or after some calls.
        """
        kind, reason = failure.kind, str(failure)
        if kind == "declined":
            kind = "unsupported" if self._is_users else "crashed"
            if (case.case, case.layout) in self._taken:
                kind, reason = "wrong", f"takes such a case with other values or in other calls, but here {reason}"
            elif self._is_users:
                reason = f"{DECLINES} ({reason})"
        return CaseVerdict(str(case), case.case.dtype, "unsupported" if kind == "memory" else kind, reason=reason)

    def _call(self, request: Request) -> Reply:
        self._verdict.calls += 1
        return self._host.call(request)

    def _check_call(
        self, case: CheckCase, draw: int = FIRST, *, gradients: bool = True, **options: Any
    ) -> tuple[CaseVerdict, list[Tensor]]:
        """Judge one call, and return its outputs too."""
        run = self._references(case, gradients and self._wants_gradients(case), draw)
        if self._kernel.builds_per_case:  # instrumentation would also watch its compiler
            options["instrumented"] = False
        request = self._references.request(case, run, **options)
        reply = self._call(request)
        self._taken.add((case.case, case.layout))
        found, got = self._compare(case, run, reply)
        if not self._op.mutates(*run.args) and not self._references.destinations(run.args):
            self._shared += [pair for pair in reply.shared if pair not in (*run.shared, *self._shared)]
        if found.verdict == "right":
            found = self._check_memory(run, request, reply) or found
        found.case, found.dtype = str(case), case.case.dtype
        if case.values not in PROBLEM_VALUES and len(reply.outputs) == len(request.output_specs):
            self._ask_problem_check(found, run, reply.outputs)
        return found, got

    def _has_a_path_without_gradients(self, case: CheckCase) -> bool:
        """Return whether a kernel that was called with gradients may take another path for this layout or values."""
        is_varied = case.layout != "contiguous" or case.values != "normal"
        return is_varied and case.mode == PLAIN and self._wants_gradients(case) and self._has_gradient is True

    def _wants_gradients(self, case: CheckCase) -> bool:
        """Return whether gradients are compared.

        Not for inputs far from zero and close to each other, where they are lost in cancellation, nor for zeros, where
        they may be undefined, nor for rows whose truth alone fills the memory.
        """
        is_suitable = case.values not in ("shifted", "zeros") and not case.is_long
        return self._kernel.differentiable and self._has_gradient is not False and is_suitable

    def _ask_problem_check(self, found: CaseVerdict, run: ReferenceRun, outputs: list[Tensor]) -> None:
        if self._problem_check is None:
            return
        try:
            objection = self._problem_check(run.args, [o.to(self._device) for o in outputs])
        except Exception as error:  # third-party code may raise anything
            objection = f"it raises {first_line(error)}"
        if found.verdict == "right" and objection:
            who = "its own reference" if self._rejects_reference(run) else "it"
            label = f"the problem's own check rejects {who}: {objection}"
            self._verdict.labels += [label] if label not in self._verdict.labels else []
        elif found.verdict == "wrong" and not objection:
            found.reason += "; the problem's own check accepts it"

    def _rejects_reference(self, run: ReferenceRun) -> bool:
        """Return whether the problem's own check rejects even the outputs of its reference."""
        assert self._problem_check is not None
        with contextlib.suppress(Exception):
            return self._problem_check(run.args, flatten(self._op.reference(*run.args))) is not None
        return True

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
                elif isinstance(wanted, ExpectedTensor) and wanted.truth.any():
                    wrong.reason = f"{wanted.name} is None"
                    return wrong, []
        if case.values == "normal" and self._is_users:
            self._empty_comparisons[shows_nothing(run.expected)] += 1
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
            ("called again", FIRST, {}),
            ("with other values in the same memory", OTHER, {"reuse_memory": True}),
            ("with the first values in that memory again", FIRST, {"reuse_memory": True}),
            ("with the same values in another order", REORDERED, {}),
            ("not instrumented, without gradients", ANOTHER, {"instrumented": False, "gradients": False}),
        ):
            result, now = self._check_call(case, draw, **options)
            if result.verdict != "right":
                result.reason = f"{what}: {result.reason}"
                return result
            if draw == FIRST:
                self._spread = max(self._spread, *(map(largest_difference, got, now)))
        return found

    def _call_more(self) -> None:
        """Call a user's kernel more often, to catch one that is honest in its first calls only.

        The number of calls of each case has a long tail, so that no number of honest calls is safe.
        """
        if not self._is_users or not self._rerun or any(case.verdict in NOT_RIGHT for case in self._verdict.cases):
            return
        generator, least = random.SystemRandom(), -(-MIN_EXTRA_CALLS // len(self._rerun))
        deadline = time.monotonic() + EXTRA_SECONDS
        for case in generator.sample(self._rerun, len(self._rerun)):
            is_large = element_count(self._op, case.case) > LARGE_ELEMENTS
            at_least, draws = (LARGE_EXTRA_CALLS, EXTRA_DRAWS[:2]) if is_large else (least, EXTRA_DRAWS)
            count = min(MAX_EXTRA_CALLS, int(MIN_EXTRA_CALLS / (1 - generator.random())))
            known: dict[tuple[int, bool], list[Tensor]] = {}
            for number in range(count):
                if number >= at_least and time.monotonic() > deadline:
                    break
                draw, gradients = generator.choice(draws), generator.random() < WITH_GRADIENTS
                reuse_memory = number > 0 and generator.random() < REUSED
                try:
                    found = self._check_extra_call(case, draw, gradients, reuse_memory, known)
                except KernelFailed as failure:
                    found = self._failed(case, failure)
                except (ReferenceFailed, torch.cuda.OutOfMemoryError):
                    break
                if found.verdict in NOT_RIGHT:
                    found.case, found.dtype = str(case), case.case.dtype
                    found.reason = f"in call {self._verdict.calls}: {found.reason}"
                    self._verdict.cases.append(found)
                    return

    def _check_extra_call(
        self,
        case: CheckCase,
        draw: int,
        gradients: bool,
        reuse_memory: bool,
        known: dict[tuple[int, bool], list[Tensor]],
    ) -> CaseVerdict:
        """Judge a call as in production: not instrumented. `known` holds what earlier calls rightly returned."""
        gradients = gradients and self._has_gradient is True and self._wants_gradients(case)
        run = self._references(case, gradients, draw)
        request = self._references.request(case, run, instrumented=False, reuse_memory=reuse_memory)
        reply = self._call(request)
        now = [*reply.outputs, *(gradient for gradient in reply.gradients if gradient is not None)]
        before = known.get((draw, gradients), ())
        if len(now) == len(before) and all(map(_equal, now, before)):
            found = CaseVerdict("", "", "right")
        else:
            found, known[draw, gradients] = self._compare(case, run, reply)
        return (found.verdict == "right" and self._check_memory(run, request, reply)) or found

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
                calls = Counter((operator_name(name), elements) for name, elements in reply.calls)
                self._fell_back += bool(run.torch_calls) and not run.torch_calls - calls

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
        size = expected[0].shape[0]
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
        smaller = -(-elements // limit)
        what = f"--scale 1/{smaller} would fit" if self._problem_check else f"{smaller} times smaller would do"
        return f"more than {limit} elements need a GPU; {what}"


def _keep_worst(verdict: CaseVerdict, match: Match) -> None:
    if match.error * verdict.budget >= verdict.max_error * match.budget:
        verdict.max_error, verdict.budget = match.error, match.budget


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.to(other.device), other)
