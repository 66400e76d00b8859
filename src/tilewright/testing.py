"""The verifier for your own functions and tests. It runs them in this process: use it for code you trust."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright import registry
from tilewright.captured import portable
from tilewright.spec import Case, Cost, Draw, Kernel, Op
from tilewright.variants import PROBLEM_VALUES, vary
from tilewright.workbench.check import OWN_INPUTS_ONLY, Verdict
from tilewright.workbench.check import check as run_check
from tilewright.workbench.check.repeatable import unsound
from tilewright.worker.execute import flatten, uncomparable
from tilewright.worker.memory import same_bits


def check(
    fn: Callable[..., Any],
    op: str | Op,
    *,
    depth: str = "default",
    dtypes: Sequence[str] | None = None,
    cases: Sequence[Case] | None = None,
    device: str | None = None,
    seed: int | None = None,
    requires_gradient: bool = False,
) -> Verdict:
    """Check whether `fn` is right as a kernel of an operation. The Verdict is true if it is.

    `depth` is "quick", "default" or "full". A function without a gradient is labelled "forward only" or, with
    `requires_gradient`, wrong.
    """
    if depth not in ("quick", "default", "full"):
        raise ValueError(f'depth must be "quick", "default" or "full", not {depth!r}')
    if not callable(fn) or not isinstance(op, str | Op):
        raise TypeError('pass the function, then the name of an operation or an Op: check(my_softmax, "softmax")')
    op = registry.load(op) if isinstance(op, str) else op
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = getattr(fn, "__name__", type(fn).__name__)
    kernel = Kernel(name, fn, "python", lambda *_: True, op.backward_cost is not None, origin="user")
    verdicts = run_check(
        op,
        [kernel],
        device=device,
        cases=cases,
        dtypes=dtypes,
        seed=seed,
        depth=depth,
        requires_gradient=requires_gradient,
    )
    return next(iter(verdicts))


def assert_kernel(
    fn: Callable[..., Any],
    *,
    reference: Callable[..., Any],
    inputs: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
    depth: str = "default",
    seed: int | None = None,
    forward_only: bool = False,
) -> None:
    """Fail unless `fn` computes what `reference` computes, within the error budget.

    If the reference has gradients, they are compared too; `forward_only` leaves them out. `inputs` is a tuple of
    arguments, whose floating-point tensors are redrawn with values of many kinds and in many layouts; or a function
    that returns such a tuple, with other values each time. Those decide; a function that fails only where they have
    other signs, scales or orders, and the reference takes those, gets a warning. A reference that does not repeat
    itself, or that writes to its inputs, raises ValueError. It may be a module or hold tensors of its own, which are
    constants: pass parameters as inputs to have their gradients compared.
    """
    example = inputs() if callable(inputs) else inputs
    reference = portable(reference)
    tensors = [a for a in example if isinstance(a, Tensor)]
    if not isinstance(example, tuple) or not tensors:
        raise TypeError("inputs must be a tuple with a tensor in it, or a function that returns one")
    make = _made_by(inputs) if callable(inputs) else _like(example)
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = str((floats or tensors)[0].dtype).removeprefix("torch.")
    case = Case((), dtype)
    if reason := _why_constant(make, case, is_function=callable(inputs)):
        raise ValueError(f"{reason}, so that a function that always returns the same would pass")
    if reason := uncomparable(reference(*_copies(example))):
        raise ValueError(f"the reference {reason}")
    if reason := unsound(reference, example):
        raise ValueError(f"the reference {reason}, so that no function can be compared with it")
    has_gradient = bool(floats) and not forward_only and _is_differentiable(reference, example)
    op = Op(
        getattr(fn, "__name__", type(fn).__name__),
        reference,
        cost=lambda *_: Cost(0, 0),
        inputs=make,
        check=[case],
        bench=[],
        backward_cost=(lambda *_: Cost(0, 0)) if has_gradient else None,
        dtypes=(dtype,),
        is_varied=not callable(inputs),
    )
    verdict = check(fn, op, depth=depth, device=tensors[0].device.type, seed=seed, requires_gradient=True)
    if verdict.verdict == OWN_INPUTS_ONLY:
        warnings.warn(f"{op.name} is right on the values of `inputs` only: {verdict.reason}", stacklevel=2)
    elif not verdict:
        picture = next((case.picture for case in verdict.cases if case.picture), ())
        hint = "; pass forward_only=True if it needs none" if "has no gradient" in verdict.reason else ""
        raise AssertionError("\n".join([f"{op.name} is {verdict.verdict}: {verdict.reason}{hint}", *picture]))


def _why_constant(make: Callable[[Draw], tuple[Any, ...]], case: Case, *, is_function: bool) -> str | None:
    """Return why the tensors of two draws are the same, or None if one differs, or if they are empty."""
    one, other = ([a for a in make(Draw(case, "cpu", seed)) if isinstance(a, Tensor)] for seed in (0, 1))
    if not any(a.numel() for a in one) or not all(map(same_bits, one, other)):
        return None
    if is_function:
        return "inputs returns the same values each time"
    return "inputs hold no floating-point tensor to be redrawn: pass a function that draws them"


def _copies(args: tuple[Any, ...]) -> list[Any]:
    return [a.detach().clone() if isinstance(a, Tensor) else a for a in args]


def _made_by(inputs: Callable[[], tuple[Any, ...]]) -> Callable[[Draw], tuple[Any, ...]]:
    def make(draw: Draw) -> tuple[Any, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(draw.seed)
            made = tuple(a.detach().to(draw.device) if isinstance(a, Tensor) else a for a in inputs())
        is_varied = draw.values in PROBLEM_VALUES and draw.device != "meta"
        return tuple(vary(made, draw.values, draw.device, draw.seed)) if is_varied else made

    return make


def _like(example: tuple[Any, ...]) -> Callable[[Draw], tuple[Any, ...]]:
    def make(draw: Draw) -> tuple[Any, ...]:
        return tuple(
            draw.randn(*a.shape, dtype=a.dtype)
            if isinstance(a, Tensor) and a.is_floating_point()
            else a.detach().to(draw.device)
            if isinstance(a, Tensor)
            else a
            for a in example
        )

    return make


def _is_differentiable(reference: Callable[..., Any], example: tuple[Any, ...]) -> bool:
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in example]
    with torch.enable_grad():
        return any(output.requires_grad for output in flatten(reference(*leaves)))
