"""The verifier for your own functions and tests. It runs them in this process: use it for code you trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright import registry
from tilewright.spec import Case, Cost, Draw, Kernel, Op
from tilewright.workbench.check import Verdict
from tilewright.workbench.check import check as run_check
from tilewright.workbench.check.repeatable import unrepeatable
from tilewright.worker.execute import flatten


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
    that returns such a tuple, which is called for every case and used unchanged. A reference that does not repeat
    itself raises ValueError.
    """
    example = inputs() if callable(inputs) else inputs
    tensors = [a for a in example if isinstance(a, Tensor)]
    if not isinstance(example, tuple) or not tensors:
        raise TypeError("inputs must be a tuple with a tensor in it, or a function that returns one")
    if reason := unrepeatable(reference, example):
        raise ValueError(f"the reference {reason}, so that no function can be compared with it")
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = str((floats or tensors)[0].dtype).removeprefix("torch.")
    has_gradient = bool(floats) and not forward_only and _is_differentiable(reference, example)
    op = Op(
        getattr(fn, "__name__", type(fn).__name__),
        reference,
        cost=lambda *_: Cost(0, 0),
        inputs=_made_by(inputs) if callable(inputs) else _like(example),
        check=[Case((), dtype)],
        bench=[],
        backward_cost=(lambda *_: Cost(0, 0)) if has_gradient else None,
        dtypes=(dtype,),
        is_varied=not callable(inputs),
    )
    verdict = check(fn, op, depth=depth, device=tensors[0].device.type, seed=seed, requires_gradient=True)
    if not verdict:
        picture = next((case.picture for case in verdict.cases if case.picture), ())
        hint = "; pass forward_only=True if it needs none" if "has no gradient" in verdict.reason else ""
        raise AssertionError("\n".join([f"{op.name} is {verdict.verdict}: {verdict.reason}{hint}", *picture]))


def _made_by(inputs: Callable[[], tuple[Any, ...]]) -> Callable[[Draw], tuple[Any, ...]]:
    def make(draw: Draw) -> tuple[Any, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(draw.seed)
            return tuple(a.detach().to(draw.device) if isinstance(a, Tensor) else a for a in inputs())

    return make


def _like(example: tuple[Any, ...]) -> Callable[[Draw], tuple[Any, ...]]:
    def make(draw: Draw) -> tuple[Any, ...]:
        return tuple(
            draw.randn(*a.shape).to(a.dtype)
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
