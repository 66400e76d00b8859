"""The inputs of a case and the expected outputs, which only the parent process holds."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import TilewrightError, first_line
from tilewright.spec import Op
from tilewright.workbench.check.budget import ExpectedTensor, expect, tighten_for_integers
from tilewright.workbench.check.cases import PROBLEM_VALUES, CheckCase, differentiable_arguments
from tilewright.worker.execute import OutputSpec, Request, flatten, trace_torch_calls
from tilewright.worker.memory import GuardedTensor

LARGE = 2**26  # elements of an output that is not cached
# Operators that allocate, copy or view, and compute nothing.
NO_WORK = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zero_", "fill_", "resize_"),
    *("_to_copy", "copy_", "clone", "detach", "expand", "view", "_unsafe_view", "as_strided", "transpose", "t"),
    *("permute", "unsqueeze", "squeeze", "select", "slice", "alias", "unbind", "split", "_local_scalar_dense"),
}


class ReferenceFailed(Exception):
    """The reference does not accept a case."""


@dataclass
class ReferenceRun:
    args: tuple[Any, ...]
    grads: list[Tensor | None]
    needs_grad: dict[int, str]  # the arguments that require a gradient, with their names
    expected: list[ExpectedTensor]
    returns_tensor: bool  # False: a collection of tensors
    torch_calls: Counter[tuple[str, int]]  # the operators that do the reference's work, with their numbers of elements


class ReferenceRuns:
    """Runs the reference once per case for all kernels."""

    def __init__(self, op: Op, device: str, seed: int, *, evicts_large: bool = True, is_training: bool = False):
        """Run references with this seed; with `is_training`, the incoming gradient of a scalar output is 1."""
        self._op, self._device, self.seed, self._is_training = op, device, seed, is_training
        self.evicts_large = evicts_large
        self._names = _parameters(op.reference)
        self._cache: dict[tuple[Any, ...], ReferenceRun] = {}

    def __call__(self, case: CheckCase, with_gradients: bool, draw: int = 0) -> ReferenceRun:
        """Return the run of a case. `draw` numbers different input values; 2 reorders those of draw 0 if possible."""
        key = (case.case, case.values, case.grad_only_of, case.no_grad_output, draw)
        if not with_gradients and (known := self._cache.get((*key, True))):
            outputs = [e for e in known.expected if not e.is_gradient]
            return replace(known, grads=[], needs_grad={}, expected=outputs)
        if (*key, with_gradients) not in self._cache:
            self._cache[(*key, with_gradients)] = self._run_reference(case, with_gradients, draw)
        return self._cache[(*key, with_gradients)]

    def request(self, case: CheckCase, run: ReferenceRun, **options: Any) -> Request:
        specs = [OutputSpec(tuple(e.truth.shape), e.dtype) for e in run.expected if not e.is_gradient]
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
            grads=[None if g is None else GuardedTensor.copy_of(g, case.layout) for g in run.grads],
            needs_grad=[*run.needs_grad] if run.grads else [],
            mode=case.mode,
            repeat=case.repeat,
            repeated=self.repeated(case),
            **options,
        )

    def evict_large(self) -> None:
        """Free the memory that large expected outputs occupy."""
        if self.evicts_large:
            self._cache = {k: r for k, r in self._cache.items() if all(e.truth.numel() < LARGE for e in r.expected)}

    def constant_output(self) -> str | None:
        """Return the value that the reference returned for all inputs so far, if it did not depend on them."""
        first_of: dict[Any, ReferenceRun] = {}
        value, has_other_inputs = None, False
        for key, run in self._cache.items():
            first = first_of.setdefault(key[0], run)
            has_other_inputs |= not _same_inputs(run, first)
            for e, f in zip(run.expected, first.expected, strict=True):
                if e.truth.shape != f.truth.shape or not e.truth.numel():
                    return None
                if value is None:
                    value, budget = float(f.truth.reshape(-1)[0]), float(f.budget.reshape(-1)[0])
                    value = 0.0 if abs(value) <= budget else value
                if not bool(((e.truth.double() - value).abs() <= f.budget).all()):
                    return None
        return f"{value:.3g}" if value is not None and has_other_inputs else None

    def _run_reference(self, case: CheckCase, with_gradients: bool, draw: int) -> ReferenceRun:
        op = self._op
        reordered = draw == 2 and op.is_varied
        seed = self.seed + 2 * (0 if reordered else draw)
        args = op.make(case.case, self._device, seed, case.values)
        if reordered:
            args = tuple(a.roll(1, -1) if _is_float(a) and a.dim() else a for a in args)
        inputs, _ = differentiable_arguments(op, case.case) if with_gradients else ([], 0)
        needs_grad = {n: self._name(n) for n in inputs if case.grad_only_of in (None, n)}
        grads: list[Tensor | None] = []
        if with_gradients:
            generator = torch.Generator(self._device).manual_seed(seed + 1)
            for like in (t for t in flatten(op.reference(*op.make(case.case, "meta"))) if t.is_floating_point()):
                grad = torch.randn(like.shape, generator=generator, device=self._device).to(like.dtype)
                grads.append(torch.ones_like(grad) if self._is_training and not like.dim() else grad)
            if case.layout == "expanded":  # as sum().backward() passes it
                grads = [g.reshape(-1)[0].expand(g.shape) if g is not None and g.numel() else g for g in grads]
            if case.no_grad_output is not None:
                grads[case.no_grad_output] = None
        try:
            expected = expect(op.reference, args, grads, needs_grad, zeros_scale=float(case.values == "zeros"))
        except (torch.cuda.OutOfMemoryError, TilewrightError):
            raise
        except Exception as error:
            raise ReferenceFailed(first_line(error)) from error
        if case.values == "integers":
            expected = [tighten_for_integers(e) for e in expected]
        run = ReferenceRun(args, grads, needs_grad, expected, *self._trace(args))
        if case.values in PROBLEM_VALUES:
            self._require_accepted(case, run)
        return run

    def _require_accepted(self, case: CheckCase, run: ReferenceRun) -> None:
        """Raise ReferenceFailed unless the reference gives as meaningful an output as for the problem's own inputs."""
        own = self(CheckCase(case.case), False)
        if _same_inputs(run, own):
            raise ReferenceFailed(f"its inputs cannot be {case.values}")
        for one, other in zip(run.expected, own.expected, strict=True):
            if int((~one.truth.isfinite()).sum()) > int((~other.truth.isfinite()).sum()):
                raise ReferenceFailed("it returns infinities or NaN")
            if case.values == "zeros" and not one.dtype.is_floating_point:
                raise ReferenceFailed("which of several equal values an index names is not defined")

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else f"argument {number + 1}"

    def _trace(self, args: tuple[Any, ...]) -> tuple[bool, Counter[tuple[str, int]]]:
        """Return whether the reference returns a single tensor, and the operators that do its work."""
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        calls, returned = trace_torch_calls(self._op.reference, copies)
        work = Counter(call for call in calls if call[0].removeprefix("aten::").partition(".")[0] not in NO_WORK)
        return isinstance(returned, Tensor), work

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


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _same_inputs(one: ReferenceRun, other: ReferenceRun) -> bool:
    """Return whether the floating-point tensors are the same, bit for bit."""
    pairs = zip(one.args, other.args, strict=True)
    return all(a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in pairs if _is_float(a))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
