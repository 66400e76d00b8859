"""The inputs of a case and the expected outputs, which only the parent process holds."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import TilewrightError, first_line
from tilewright.spec import FAR_BELOW, HALVES, Case, Op
from tilewright.variants import PROBLEM_VALUES, is_symmetric, may_change
from tilewright.workbench.check import steps
from tilewright.workbench.check.budget import (
    ExpectedTensor,
    SlicedTensor,
    expect,
    loosen_gradients,
    tighten_for_integers,
    tighten_for_moves,
)
from tilewright.workbench.check.cases import CheckCase, differentiable_arguments, output_shapes
from tilewright.workbench.check.operators import MOVES, NO_WORK, PRODUCTS, UNORDERED, operator_name
from tilewright.workbench.check.slices import Rows, candidates, expect_rows
from tilewright.worker.execute import OutputSpec, Request, flatten, shared_memory, trace_torch_calls
from tilewright.worker.memory import GuardedTensor, same_bits
from tilewright.worker.results import result_names

LARGE = 2**28  # bytes of a run that is not kept for long
KEPT_BYTES = {"cpu": 2**30, "cuda": 2**33}  # that large runs may take in all
FAR = (FAR_BELOW, "scaled far up")  # values for which gradients are lost in cancellation
TIED_VALUES = ("integers", HALVES, "constant rows", "one hot", "repeated")


# Draws of a case's input values: the first, others, those of the first in another order, and those of the first with
# one element or about half of them replaced. A result that is cached by some of the elements shows in the last two.
FIRST, OTHER, REORDERED, ANOTHER, ONE_REPLACED, HALF_REPLACED = range(6)


class ReferenceFailed(Exception):
    """The reference does not accept a case."""


@dataclass
class ReferenceRun:
    args: tuple[Any, ...]
    grads: list[Tensor | None]
    needs_grad: dict[int, str]  # the arguments that require a gradient, with their names
    expected: Sequence[ExpectedTensor | SlicedTensor]
    returns_tensor: bool  # False: a collection of tensors
    names: list[str] | None  # the keys of the outputs, if they are in a dictionary
    torch_calls: Counter[tuple[str, int]]  # the operators that do the reference's work, with their numbers of elements
    shared: list[str]  # outputs that share memory with arguments or each other

    @property
    def nbytes(self) -> int:
        held = [*self.args, *self.grads]
        for one in self.expected:
            held += [one.truth, one.budget] if isinstance(one, ExpectedTensor) else []
        return sum(t.nbytes for t in held if isinstance(t, Tensor))


class ReferenceRuns:
    """Runs the reference once per case for all kernels."""

    def __init__(
        self,
        op: Op,
        device: str,
        seed: int,
        *,
        evicts_large: bool = True,
        is_training: bool = False,
        destinations: Callable[[Sequence[Any]], Sequence[Tensor]] = lambda _: (),
    ):
        """Run references with this seed; with `is_training`, the incoming gradient of a scalar output is 1.

        `destinations` returns the arguments that a kernel may fill and return in place of an output.
        """
        self.destinations = destinations
        self._op, self._device, self.seed, self._is_training = op, device, seed, is_training
        self.evicts_large = evicts_large
        self._names = _parameters(op.reference)
        self._cache: dict[tuple[Any, ...], ReferenceRun] = {}
        self._non_finite: dict[Case, list[int]] = {}  # elements of the outputs for a case's own inputs
        self._rows: dict[Case, Rows | None] = {}  # how a case is cut into rows; None: not at all

    def __call__(self, case: CheckCase, with_gradients: bool, draw: int = FIRST) -> ReferenceRun:
        """Return the run of a case, with the input values of this draw."""
        key = (case.case, case.values, case.grad_only_of, case.no_grad_output, draw)
        if not with_gradients and (known := self._cache.get((*key, True))):
            outputs = [e for e in known.expected if not e.is_gradient]
            return replace(known, grads=[], needs_grad={}, expected=outputs)
        if (*key, with_gradients) not in self._cache:
            self._evict_large()
            try:
                run = self._run_reference(case, with_gradients, draw)
            except torch.cuda.OutOfMemoryError:
                self._evict_large(keep=0)
                torch.cuda.empty_cache()
                run = self._run_reference(case, with_gradients, draw)
            self._cache[(*key, with_gradients)] = run
        return self._cache[(*key, with_gradients)]

    def request(self, case: CheckCase, run: ReferenceRun, **options: Any) -> Request:
        specs = [OutputSpec(e.shape, e.dtype, e.others) for e in run.expected if not e.is_gradient]
        if case.repeat > 1:
            specs = [OutputSpec((spec.shape[0] * case.repeat, *spec.shape[1:]), spec.dtype) for spec in specs]
        # A kernel cannot write to an expanded tensor, whose elements share memory.
        contiguous = self._op.mutates(*run.args) if case.layout == "expanded" else ()
        layouts = ["contiguous" if number in contiguous else case.layout for number in range(len(run.args))]
        return Request(
            args=[
                GuardedTensor.copy_of(a, layout) if isinstance(a, Tensor) else a
                for a, layout in zip(run.args, layouts, strict=True)
            ],
            output_specs=specs,
            returns_tensor=run.returns_tensor,
            names=run.names,
            grads=[None if g is None else GuardedTensor.copy_of(g, case.layout) for g in run.grads],
            needs_grad=[*run.needs_grad] if run.grads else [],
            mode=case.mode,
            repeat=case.repeat,
            repeated=self.repeated(case),
            **options,
        )

    def _evict_large(self, keep: int | None = None) -> None:
        """Drop the oldest large runs, until those left take `keep` bytes at most."""
        if not self.evicts_large:
            return
        keep = KEPT_BYTES[self._device] if keep is None else keep
        sizes = {key: run.nbytes for key, run in self._cache.items()}
        large = [key for key, size in sizes.items() if size >= LARGE]
        held = sum(sizes[key] for key in large)
        for key in large:
            if held <= keep:
                break
            held -= sizes[key]
            del self._cache[key]

    def constant_output(self) -> str | None:
        """Return the value that the reference returned for all inputs so far, if it did not depend on them."""
        first_of: dict[Any, ReferenceRun] = {}
        value, has_other_inputs = None, False
        for key, run in self._cache.items():
            first = first_of.setdefault(key[0], run)
            has_other_inputs |= not _same_inputs(run.args, first.args)
            outputs = [[e for e in one.expected if not e.is_gradient] for one in (run, first)]
            for e, f in zip(*outputs, strict=True):
                if isinstance(e, SlicedTensor) or isinstance(f, SlicedTensor):
                    return None
                if e.truth.shape != f.truth.shape or not e.truth.numel():
                    return None
                if value is None:
                    value, budget = float(f.truth.reshape(-1)[0]), float(f.budget.reshape(-1)[0])
                    value = 0.0 if abs(value) <= budget else value
                truth = e.truth.double()
                is_same = (truth == value) | ((truth - value).abs() <= f.budget) | (truth.isnan() & (value != value))
                if not bool(is_same.all()):
                    return None
        return f"{value:.3g}" if value is not None and has_other_inputs else None

    def constant_inputs(self) -> list[str]:
        """Return the arguments that held the same values however they were drawn, with the value if it is one.

        Of an operation of the user's also the numbers and words among them.
        """
        runs_of: dict[Case, dict[tuple[str, int], ReferenceRun]] = {}
        for (case, values, _, _, draw, _), run in self._cache.items():
            runs_of.setdefault(case, {})[values, draw] = run
        groups = [[*runs.values()] for runs in runs_of.values() if len(runs) > 1]
        if not groups:
            return []
        found, buffers = [], self.destinations(groups[-1][0].args)
        for number, first in enumerate(groups[-1][0].args):
            if self._op.file and isinstance(first, bool | int | float | str):
                if all(run.args[number] == first for runs in runs_of.values() for run in runs.values()):
                    found.append(f"{self._name(number)} = {first}")
                continue
            if not isinstance(first, Tensor) or not first.numel() or any(first is one for one in buffers):
                continue
            if all(same_bits(run.args[number], group[0].args[number]) for group in groups for run in group[1:]):
                elements = first.reshape(-1)
                is_one = bool((elements == elements[0]).all())
                found.append(f"argument {number + 1}" + (f" = {elements[0].item():g}" if is_one else ""))
        return found

    def _run_reference(self, case: CheckCase, with_gradients: bool, draw: int) -> ReferenceRun:
        op = self._op
        seed = self.seed + 2 * draw
        args = self._draw(case, draw)
        inputs, _ = differentiable_arguments(op, case.case) if with_gradients else ([], 0)
        needs_grad = {n: self._name(n) for n in inputs if case.grad_only_of in (None, n)}
        grads: list[Tensor | None] = []
        if with_gradients:
            generator = torch.Generator(self._device).manual_seed(seed + 1)
            for like in (t for t in output_shapes(op, case.case) if t.is_floating_point()):
                grad = torch.randn(like.shape, generator=generator, device=self._device).to(like.dtype)
                grads.append(torch.ones_like(grad) if self._is_training and not like.dim() else grad)
            if case.layout == "expanded":  # as sum().backward() passes it
                grads = [g.reshape(-1)[0].expand(g.shape) if g is not None and g.numel() else g for g in grads]
            if case.no_grad_output is not None:
                grads[case.no_grad_output] = None
        try:
            zeros_scale, destinations = float(case.values == "zeros"), self.destinations(args)
            returned, calls, shared = self._trace(args)
            moves = all(operator_name(name) in MOVES for name, _ in calls)
            multiplies = any(operator_name(name) in PRODUCTS for name, _ in calls)
            if case.values == FAR_BELOW and multiplies:  # a rounding error of a product may choose another maximum
                needs_grad, grads = {}, []
            if case.values in TIED_VALUES and op.file and self._names_ties(args, calls):
                raise ReferenceFailed("which of several equal values an index names is not defined")
            expected = None
            if self.evicts_large and not grads:
                expected = self._expect_rows(case, args, zeros_scale, destinations, moves)
            if expected is None:
                has_steps = not moves and any(operator_name(name) in steps.OPERATORS for name, _ in calls)
                expected = expect(
                    op.reference,
                    args,
                    grads,
                    needs_grad,
                    zeros_scale,
                    destinations,
                    has_steps,
                    op.precision(*args),
                    multiplies,
                )
                expected = [tighten_for_integers(e) for e in expected] if case.values == "integers" else expected
                expected = [tighten_for_moves(e) for e in expected] if moves else expected
                expected = loosen_gradients(expected) if case.values in FAR else expected
        except (torch.cuda.OutOfMemoryError, TilewrightError, ReferenceFailed):
            raise
        except Exception as error:
            raise ReferenceFailed(first_line(error)) from error
        named = [(operator_name(name), elements) for name, elements in calls]
        work = Counter(call for call in named if call[0] not in NO_WORK)
        is_tensor, names = isinstance(returned, Tensor), result_names(returned)
        run = ReferenceRun(args, grads, needs_grad, expected, is_tensor, names, work, shared)
        if case.values in PROBLEM_VALUES:
            self._require_accepted(case, run)
        elif case.values == "normal" and not draw:
            self._non_finite[case.case] = [e.non_finite for e in expected if not e.is_gradient]
        return run

    def _draw(self, case: CheckCase, draw: int) -> tuple[Any, ...]:
        """Return the inputs of a case; of draws that change the first, other values where that is not possible."""
        make = lambda draw: self._op.make(case.case, self._device, self.seed + 2 * draw, case.values)
        if draw == REORDERED and self._op.is_varied:
            return tuple(_stored_as(a, _bits(a).roll(1, -1)) if _is_float(a) and a.dim() else a for a in make(FIRST))
        if draw not in (ONE_REPLACED, HALF_REPLACED):
            return make(draw)
        generator = torch.Generator(self._device).manual_seed(self.seed + 2 * draw)
        first, other, found = make(FIRST), make(draw), []
        for one, another in zip(first, other, strict=True):
            is_mixed = _is_float(one) and one.numel() and one.shape == another.shape
            if is_mixed and (self._op.is_varied or (may_change(one) and not is_symmetric(one))):
                order = torch.rand(one.numel(), generator=generator, device=self._device)
                is_new = torch.zeros_like(order, dtype=torch.bool) if draw == ONE_REPLACED else order < 0.5
                is_new[order.argmin()] = True
                another = _stored_as(one, torch.where(is_new.view(one.shape), _bits(another), _bits(one)))
            found.append(another)
        return tuple(found)

    def _expect_rows(
        self, case: CheckCase, args: Sequence[Any], zeros_scale: float, destinations: Sequence[Tensor], moves: bool
    ) -> list[SlicedTensor] | None:
        """Return the expected outputs by rows if at once they would take too much memory, and rows are independent."""
        known = self._rows.get(case.case)
        if known is None and case.case in self._rows:
            return None
        refine = tighten_for_moves if moves else (lambda expected: expected)
        options: dict[str, Any] = {"refine": refine, "zeros_scale": zeros_scale, "destinations": destinations}
        if known is None:
            try:
                shapes = self._op.make(case.case, "meta")
                ways = candidates(shapes, flatten(self._op.reference(*shapes)))
            except Exception:  # a reference that needs values to know its shapes
                ways = []
        else:
            ways = [known]
        self._rows[case.case] = None
        for rows in ways:
            found = expect_rows(self._op.reference, args, rows, is_proven=known is not None, **options)
            if found is not None:
                self._rows[case.case] = rows
                return found
        return None

    def _require_accepted(self, case: CheckCase, run: ReferenceRun) -> None:
        """Raise ReferenceFailed unless the reference gives as meaningful an output as for the problem's own inputs."""
        if case.case not in self._non_finite:
            self(CheckCase(case.case), False)
        own = self._op.make(case.case, self._device, self.seed)
        if _same_inputs(run.args, own):
            raise ReferenceFailed(f"its inputs cannot be {case.values}")
        outputs = [e for e in run.expected if not e.is_gradient]
        for one, non_finite in zip(outputs, self._non_finite[case.case], strict=True):
            if one.non_finite > non_finite:
                raise ReferenceFailed("it returns infinities or NaN")
            if case.values == "zeros" and not one.dtype.is_floating_point:
                raise ReferenceFailed("which of several equal values an index names is not defined")

    def _names_ties(self, args: Sequence[Any], calls: Sequence[tuple[str, int]]) -> bool:
        """Return whether the reference returns integers and calls an operator that leaves open which of equal ones."""
        is_unordered = any(operator_name(name) in UNORDERED and not name.endswith(".stable") for name, _ in calls)
        return is_unordered and any(
            isinstance(o, Tensor) and not o.is_floating_point() for o in flatten(self._op.reference(*args))
        )

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else f"argument {number + 1}"

    def _trace(self, args: Sequence[Any]) -> tuple[Any, list[tuple[str, int]], list[str]]:
        """Return what the reference returns, the operators it calls, and the memory it shares."""
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        calls, returned = trace_torch_calls(self._op.reference, copies)
        return returned, calls, shared_memory(flatten(returned), copies)

    def repeated(self, case: CheckCase) -> list[int]:
        """Return the arguments to repeat: those whose first dimension is the Op's batch."""
        if case.repeat == 1:
            return []
        batch = self._op.batch
        longer = case.case.with_size(batch, 2 * case.case[batch])  # type: ignore[arg-type,index,operator]
        pairs = zip(self._op.make(case.case, "meta"), self._op.make(longer, "meta"), strict=True)
        return [n for n, (a, b) in enumerate(pairs) if isinstance(a, Tensor) and a.shape != b.shape]


def _parameters(fn: Any) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except ValueError:  # a builtin has no signature
        return []


def _bits(tensor: Tensor) -> Tensor:
    """Return a view that more operators take, if the dtype is fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _stored_as(like: Tensor, bits: Tensor) -> Tensor:
    """Return these bits in the dtype and with the order of dimensions of another tensor."""
    return torch.empty_like(_bits(like)).copy_(bits).view(like.dtype)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _same_inputs(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether the floating-point tensors are the same, bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(a.shape == b.shape and same_bits(a, b) for a, b in pairs if _is_float(a))
