"""Variance over dimensions: y = sum of (x - mean)^2 / (N - correction).

A row that one program holds, or a tile of a longer one, is summed twice from registers. Where rows are many, or tiles
do not divide them, lanes sum distances from the mean of the first block and their squares; that mean is close enough
that little cancels. Parts are combined by their means and counts (Chan's formula).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import DIMENSIONS, reduction_op
from tilewright.ops.reduce._operators import dispatch, reduce
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["var"]


def reference(x: Tensor) -> Tensor:
    return torch.var(x, dim=-1)


op = reduction_op("var", reference)


@op.kernel("triton", language="triton")
def triton_var(x: Tensor) -> Tensor:
    return reduce(x, (1,), "var", p=1.0)


CROSSOVER = Crossover("var", faster_after(us=0.44, bytes_per_element=2), captured=always)


def var(
    input: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False, out: Tensor | None = None
) -> Tensor:
    """Variance over dimensions, with the arguments of `torch.var`."""
    if out is None and type(correction) in (int, float):
        dims = tuple(dim) if type(dim) is list else dim
        y = dispatch(CROSSOVER, (dims, keepdim, "var", float(correction)), input)
        if y is not None:
            return y
    return torch.var(input, dim, correction=correction, keepdim=keepdim, out=out)


@op.public
def public(x: Tensor) -> Tensor:
    return var(x, -1)


op.over(torch.var, var, DIMENSIONS)
