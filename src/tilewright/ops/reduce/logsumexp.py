"""Logarithm of the sum of exponentials over dimensions: y = max x + log sum exp(x - max x).

Each lane keeps a running maximum and the sum of exp(x - maximum), rescaled when the maximum grows: one exp per element
either way. The gradient is softmax: exp(x - y).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import DIMENSIONS, reduction_op
from tilewright.ops.reduce._cases import backward_cost as plain_backward_cost
from tilewright.ops.reduce._cases import cost as plain_cost
from tilewright.ops.reduce._operators import dispatch, reduce
from tilewright.runtime.crossovers import Crossover, always
from tilewright.spec import Cost

__all__ = ["logsumexp"]


def reference(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=-1)


def cost(x: Tensor) -> Cost:
    return plain_cost(x) + Cost(0, 0, {"fp32": 3 * x.numel(), "special": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    return plain_backward_cost(x) + Cost(0, 0, {"special": x.numel()})


op = reduction_op(
    "logsumexp",
    reference,
    cost=cost,
    backward_cost=backward_cost,
    inputs=lambda draw: (draw.randn("M", "N", scale=3.0),),
)


@op.kernel("triton", language="triton")
def triton_logsumexp(x: Tensor) -> Tensor:
    return reduce(x, (1,), "logsumexp")


CROSSOVER = Crossover("logsumexp", always)


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Logarithm of the sum of exponentials, with the arguments of `torch.logsumexp`."""
    y = None
    if dim is not None and out is None:
        dims = tuple(dim) if type(dim) is list else dim
        y = dispatch(CROSSOVER, (dims, keepdim, "logsumexp"), input)
    return torch.logsumexp(input, dim, keepdim, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return logsumexp(x, -1)


op.over(torch.logsumexp, logsumexp, DIMENSIONS)
