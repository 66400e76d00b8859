"""Product over dimensions: y = product of x over each row.

The gradient of an element is the product of the others: y / x where no element is zero; where one is, it alone has a
gradient, the product of the rest; where more are, none has. So forward leaves the product of what is not zero, and how
many are, where gradients are wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._operators import BENCH, CHECK, backward_cost, cost, reduce, reduced
from tilewright.spec import Op


def reference(x: Tensor) -> Tensor:
    return torch.prod(x, dim=-1)


op = Op(
    "prod",
    reference,
    cost,
    inputs=lambda draw: (1 + draw.randn("M", "N", scale=1 / 64),),
    check=CHECK,
    bench=BENCH,
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_prod(x: Tensor) -> Tensor:
    return reduce(x, (1,), False, "prod")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def prod(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.prod`: the fast kernels where they fit, torch elsewhere."""
    if type(dim) is int or (dim is None and keepdim is False):
        y = reduced(SMALLEST, input, dim, keepdim, "prod", dtype=dtype)
        if y is not None:
            return y
    if dim is None and keepdim is False:
        return torch.prod(input, dtype=dtype)
    return torch.prod(input, dim, keepdim, dtype=dtype)


@op.public
def public(x: Tensor) -> Tensor:
    return prod(x, -1)
