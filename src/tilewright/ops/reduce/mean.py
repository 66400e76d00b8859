"""Mean over dimensions: y = sum of x over each row / N."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import DIMENSIONS, expanded_cost, reduction_op
from tilewright.ops.reduce._operators import dispatch, reduce
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["mean"]


def reference(x: Tensor) -> Tensor:
    return torch.mean(x, dim=-1)


op = reduction_op("mean", reference, backward_cost=expanded_cost)


@op.kernel("triton", language="triton")
def triton_mean(x: Tensor) -> Tensor:
    return reduce(x, (1,), "mean")


CROSSOVER = Crossover("mean", faster_after(us=0.44, bytes_per_element=2), captured=always)


def mean(
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Mean over dimensions, with the arguments of `torch.mean`."""
    dims = tuple(dim) if type(dim) is list else dim
    y = dispatch(CROSSOVER, (dims, keepdim, "mean", 0.0, dtype), input) if out is None else None
    return torch.mean(input, dim, keepdim, dtype=dtype, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return mean(x, -1)


op.over(torch.mean, mean, DIMENSIONS)
