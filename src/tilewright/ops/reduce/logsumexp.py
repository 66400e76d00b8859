"""Logarithm of the sum of exponentials over dimensions: y = max x + log sum exp(x - max x).

Each lane keeps the largest element it has met and the sum of exp(x - largest), which shrinks when a larger one comes:
one exp an element either way. The gradient is softmax: exp(x - y).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._operators import BENCH, CHECK, reduce, reduced
from tilewright.spec import Cost, Op


def reference(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=-1)


def cost(x: Tensor) -> Cost:
    written = x.numel() // max(1, x.shape[-1]) * x.element_size()
    return Cost(read=x.nbytes, written=written, flops={"fp32": 4 * x.numel(), "special": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    rows = x.numel() // max(1, x.shape[-1])
    read = x.nbytes + 2 * rows * x.element_size()
    return Cost(read=read, written=x.nbytes, flops={"fp32": 2 * x.numel(), "special": x.numel()})


op = Op(
    "logsumexp",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N", scale=3.0),),
    check=CHECK,
    bench=BENCH,
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_logsumexp(x: Tensor) -> Tensor:
    return reduce(x, (1,), False, "logsumexp")


SMALLEST = 0  # elements: one launch costs the host less than torch's several, and no input is too small for that


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """As `torch.logsumexp`: the fast kernels where they fit, torch elsewhere."""
    y = reduced(SMALLEST, input, dim, keepdim, "logsumexp") if dim is not None and out is None else None
    return torch.logsumexp(input, dim, keepdim, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return logsumexp(x, -1)
