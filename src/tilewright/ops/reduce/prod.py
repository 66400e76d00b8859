"""Product over dimensions: y = product of x over each row.

The gradient of an element is the product of the others: y / x where no element is zero; with one zero, that element
alone has a gradient, the product of the rest; with more, none has. So where gradients are needed, forward keeps the
product of the nonzero elements and the number of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import reduction_op
from tilewright.ops.reduce._operators import dispatch, reduce
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["prod"]


def reference(x: Tensor) -> Tensor:
    return torch.prod(x, dim=-1)


op = reduction_op("prod", reference, inputs=lambda draw: (1 + draw.randn("M", "N", scale=1 / 64),))


@op.kernel("triton", language="triton")
def triton_prod(x: Tensor) -> Tensor:
    return reduce(x, (1,), "prod")


CROSSOVER = Crossover("prod", faster_after(us=0.44, bytes_per_element=2), captured=always)


def prod(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Product over dimensions, with the arguments of `torch.prod`."""
    over_all = dim is None and keepdim is False
    if over_all or type(dim) is int:
        y = dispatch(CROSSOVER, (dim, keepdim, "prod", 0.0, dtype), input)
        if y is not None:
            return y
    return torch.prod(input, dtype=dtype) if over_all else torch.prod(input, dim, keepdim, dtype=dtype)


@op.public
def public(x: Tensor) -> Tensor:
    return prod(x, -1)


op.over(torch.prod, prod, (0, 1))
