"""Smallest element over dimensions; NaN if there is one. Equal ones share the gradient.

`min` is torch's older form: with a dimension it also says where the element is, and the gradient goes there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._operators import (
    BENCH,
    CHECK,
    backward_cost,
    cost,
    extreme_with_index,
    reduce,
    reduced,
    takes,
)
from tilewright.spec import Op


def reference(x: Tensor) -> Tensor:
    return torch.amin(x, dim=-1)


op = Op(
    "amin",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=CHECK,
    bench=BENCH,
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_amin(x: Tensor) -> Tensor:
    return reduce(x, (1,), False, "amin")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def amin(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """As `torch.amin`: the fast kernels where they fit, torch elsewhere."""
    y = None if out is not None else reduced(SMALLEST, input, None if dim == () else dim, keepdim, "amin")
    return torch.amin(input, dim, keepdim, out=out) if y is None else y


def min(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `torch.min`, in all its forms: the fast kernels where they fit, torch elsewhere."""
    if takes(SMALLEST, input) and not args and not kwargs:
        return amin(input)
    return extreme_with_index(SMALLEST, torch.min, torch.return_types.min, input, *args, **kwargs)


@op.public
def public(x: Tensor) -> Tensor:
    return amin(x, -1)
