"""Variance over dimensions: y = sum of (x - mean)^2 / (N - correction).

A row that one program holds, or a tile of a longer one, is summed twice there. Where rows are many, or tiles do not
divide them, lanes sum distances, and their squares, from the mean of the first block, which is near enough that little
cancels. Pieces are put together by their means and counts (Chan).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._operators import BENCH, CHECK, backward_cost, cost, reduce, reduced
from tilewright.spec import Op


def reference(x: Tensor) -> Tensor:
    return torch.var(x, dim=-1)


op = Op(
    "var",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=CHECK,
    bench=BENCH,
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_var(x: Tensor) -> Tensor:
    return reduce(x, (1,), False, "var", 1.0)


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def var(
    input: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False, out: Tensor | None = None
) -> Tensor:
    """As `torch.var`: the fast kernels where they fit, torch elsewhere."""
    if out is None and type(correction) in (int, float):
        y = reduced(SMALLEST, input, dim, keepdim, "var", float(correction))
        if y is not None:
            return y
    return torch.var(input, dim, correction=correction, keepdim=keepdim, out=out)


@op.public
def public(x: Tensor) -> Tensor:
    return var(x, -1)
