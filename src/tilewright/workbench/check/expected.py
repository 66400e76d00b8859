"""Inputs of a trial and what a right kernel makes of them; known to the parent alone."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import TilewrightError, first_line
from tilewright.spec import Op
from tilewright.workbench.check.budget import Expected, exact_where_whole, expect
from tilewright.workbench.check.cases import Trial, differentiable
from tilewright.worker.execute import Like, Request, flat, operators_called
from tilewright.worker.memory import Placed

# Not work: they give memory, move values or look at them otherwise.
MOVES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zero_", "fill_", "resize_"),
    *("_to_copy", "copy_", "clone", "detach", "expand", "view", "_unsafe_view", "as_strided", "transpose", "t"),
    *("permute", "unsqueeze", "squeeze", "select", "slice", "alias", "unbind", "split", "_local_scalar_dense"),
}


class ReferenceFailed(Exception):
    """The reference itself does not take a trial."""


@dataclass
class Answer:
    args: tuple[Any, ...]
    grads: list[Tensor | None]
    needs: dict[int, str]  # arguments that need a gradient, and their names
    expected: list[Expected]
    is_single: bool  # the reference returns a tensor, not a collection of them
    work: Counter[tuple[str, int]]  # torch's operators that the reference calls, and on how many elements


class Answers:
    """By trial, made once for all kernels."""

    def __init__(self, op: Op, device: str, seed: int, *, forgets: bool = True, is_training: bool = False):
        """If training, the incoming gradient of a single number is 1, as loss.backward() has it."""
        self._op, self._device, self.seed, self.forgets, self._is_training = op, device, seed, forgets, is_training
        self._names = _parameters(op.reference)
        self._known: dict[tuple[Any, ...], Answer] = {}

    def __call__(self, trial: Trial, with_gradients: bool, other: int = 0) -> Answer:
        """`other` numbers further values of the same case; 2 are the first ones in another order, where that may be."""
        key = (trial.case, trial.values, trial.only, trial.silent, with_gradients, other)
        if key not in self._known:
            self._known[key] = self._answer(trial, with_gradients, other)
        return self._known[key]

    def request(self, trial: Trial, answer: Answer, **more: Any) -> Request:
        wanted = [Like(tuple(e.truth.shape), e.dtype) for e in answer.expected if not e.is_gradient]
        if trial.repeat > 1:
            wanted = [Like((like.shape[0] * trial.repeat, *like.shape[1:]), like.dtype) for like in wanted]
        plain = self._op.mutates(*answer.args) if trial.layout == "expanded" else ()  # one cannot write where all lie
        layouts = ["contiguous" if number in plain else trial.layout for number in range(len(answer.args))]
        return Request(
            args=[Placed.of(a, at) if isinstance(a, Tensor) else a for a, at in zip(answer.args, layouts, strict=True)],
            wanted=wanted,
            is_single=answer.is_single,
            grads=[None if g is None else Placed.of(g, trial.layout) for g in answer.grads],
            needs=[*answer.needs] if answer.grads else [],
            how=trial.how,
            repeat=trial.repeat,
            repeated=self.repeated(trial),
            **more,
        )

    def forget(self) -> None:
        """Large truths fill the memory that the next needs."""
        if self.forgets:
            self._known = {k: a for k, a in self._known.items() if all(e.truth.numel() < 2**26 for e in a.expected)}

    def _answer(self, trial: Trial, with_gradients: bool, other: int) -> Answer:
        op, case = self._op, trial.case
        reordered = other == 2 and op.is_varied
        seed = self.seed + 2 * (0 if reordered else other)
        args = op.make(case, self._device, seed, trial.values)
        if reordered:
            args = tuple(a.roll(1, -1) if _is_float(a) and a.dim() else a for a in args)
        leaves, _ = differentiable(op, case) if with_gradients else ([], 0)
        needs = {n: self._name(n) for n in leaves if trial.only in (None, n)}
        grads: list[Tensor | None] = []
        if with_gradients:
            generator = torch.Generator(self._device).manual_seed(seed + 1)
            for like in (t for t in flat(op.reference(*op.make(case, "meta"))) if t.is_floating_point()):
                grad = torch.randn(like.shape, generator=generator, device=self._device).to(like.dtype)
                grads.append(torch.ones_like(grad) if self._is_training and not like.dim() else grad)
            if trial.layout == "expanded":  # as sum().backward() sends it
                grads = [g.reshape(-1)[0].expand(g.shape) if g is not None and g.numel() else g for g in grads]
            if trial.silent is not None:
                grads[trial.silent] = None
        try:
            expected = expect(op.reference, args, grads, needs)
        except (torch.cuda.OutOfMemoryError, TilewrightError):
            raise
        except Exception as error:
            raise ReferenceFailed(first_line(error)) from error
        if trial.values == "integers":
            expected = [exact_where_whole(e) for e in expected]
        return Answer(args, grads, needs, expected, *self._watched(args))

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else f"argument {number + 1}"

    def _watched(self, args: tuple[Any, ...]) -> tuple[bool, Counter[tuple[str, int]]]:
        """Whether the reference returns one tensor, and the operators it calls."""
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        calls, returned = operators_called(self._op.reference, copies)
        work = Counter(call for call in calls if call[0].removeprefix("aten::").partition(".")[0] not in MOVES)
        return isinstance(returned, Tensor), work

    def repeated(self, trial: Trial) -> list[int]:
        """The arguments to be repeated: those whose first dimension is the Op's batch."""
        if trial.repeat == 1:
            return []
        batch = self._op.batch
        longer = trial.case.with_size(batch, 2 * trial.case[batch])  # type: ignore[arg-type,index,operator]
        pairs = zip(self._op.make(trial.case, "meta"), self._op.make(longer, "meta"), strict=True)
        return [n for n, (a, b) in enumerate(pairs) if isinstance(a, Tensor) and a.shape != b.shape]


def _parameters(fn: Any) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except ValueError:  # a builtin does not tell
        return []


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
