"""The verifier for anyone's functions and anyone's tests. They run in this process: for code you trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright import registry
from tilewright.spec import Case, Cost, Draw, Kernel, Op
from tilewright.workbench.check import Verdict
from tilewright.workbench.check import check as run_check
from tilewright.worker.execute import flat


def check(
    fn: Callable[..., Any],
    op: str | Op,
    *,
    depth: str = "default",
    dtypes: Sequence[str] | None = None,
    cases: Sequence[Case] | None = None,
    device: str | None = None,
    seed: int | None = None,
) -> Verdict:
    """Is `fn` right as a kernel of the named operation? `depth` is quick, default or full."""
    if depth not in ("quick", "default", "full"):
        raise ValueError(f'depth is "quick", "default" or "full", not {depth!r}')
    known = registry.load(op) if isinstance(op, str) else op
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = getattr(fn, "__name__", type(fn).__name__)
    kernel = Kernel(name, fn, "python", lambda *_: True, differentiable=known.backward_cost is not None)
    asked = run_check(known, [kernel], device=device, cases=cases, dtypes=dtypes, seed=seed, depth=depth)
    return next(iter(asked))


def assert_kernel(
    fn: Callable[..., Any],
    *,
    reference: Callable[..., Any],
    inputs: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
    depth: str = "default",
    seed: int | None = None,
) -> None:
    """Fail unless `fn` does what `reference` does, within the error budget, gradients too if the reference has any.

    `inputs` is a tuple of arguments, whose floating-point tensors are drawn anew, with values of many kinds and in many
    layouts; or a function that makes such a tuple, which is called for every trial and taken as it is.
    """
    example = inputs() if callable(inputs) else inputs
    tensors = [a for a in example if isinstance(a, Tensor)]
    if not isinstance(example, tuple) or not tensors:
        raise TypeError("inputs is a tuple with a tensor in it, or a function that makes one")
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = str((floats or tensors)[0].dtype).removeprefix("torch.")
    device = tensors[0].device.type
    op = Op(
        getattr(fn, "__name__", type(fn).__name__),
        reference,
        cost=lambda *_: Cost(0, 0),
        inputs=_made(inputs) if callable(inputs) else _like(example),
        check=[Case((), dtype)],
        bench=[],
        backward_cost=(lambda *_: Cost(0, 0)) if floats and _is_differentiable(reference, example) else None,
        dtypes=(dtype,),
        is_varied=not callable(inputs),
    )
    verdict = check(fn, op, depth=depth, device=device, seed=seed)
    if verdict.verdict != "right":
        picture = next((case.picture for case in verdict.cases if case.picture), ())
        raise AssertionError("\n".join([f"{op.name} is {verdict.verdict}: {verdict.reason}", *picture]))


def _made(inputs: Callable[[], tuple[Any, ...]]) -> Callable[[Draw], tuple[Any, ...]]:
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
        return any(output.requires_grad for output in flat(reference(*leaves)))
