"""Mean over dimensions: y = sum of x over each row / N."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._operators import BENCH, CHECK, cost, reduce, reduced
from tilewright.spec import Cost, Op


def reference(x: Tensor) -> Tensor:
    return torch.mean(x, dim=-1)


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=0, written=0)  # the incoming gradient / N, expanded without a copy


op = Op(
    "mean",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=CHECK,
    bench=BENCH,
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_mean(x: Tensor) -> Tensor:
    return reduce(x, (1,), False, "mean")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def mean(
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `torch.mean`: the fast kernels where they fit, torch elsewhere."""
    y = None if out is not None else reduced(SMALLEST, input, dim, keepdim, "mean", dtype=dtype)
    return torch.mean(input, dim, keepdim, dtype=dtype, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return mean(x, -1)
