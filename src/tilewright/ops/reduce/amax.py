"""Largest element over dimensions; NaN if there is one. Equal elements share the gradient.

`max` is torch's older function: over a dimension it also returns the index, and the gradient goes to that element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import reduction_op
from tilewright.ops.reduce._operators import dispatch, eligible_reduction, extreme_with_index, reduce

__all__ = ["amax", "max"]


def reference(x: Tensor) -> Tensor:
    return torch.amax(x, dim=-1)


op = reduction_op("amax", reference)


@op.kernel("triton", language="triton")
def triton_amax(x: Tensor) -> Tensor:
    return reduce(x, (1,), "amax")


SMALLEST = 2**20  # elements, below which torch takes less time than our call costs the host


def amax(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Largest element over dimensions, with the arguments of `torch.amax`."""
    dims = None if dim == () else tuple(dim) if type(dim) is list else dim
    y = dispatch(SMALLEST, (dims, keepdim, "amax"), input) if out is None else None
    return torch.amax(input, dim, keepdim, out=out) if y is None else y


def max(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Largest element, with its index over a dimension, in all forms of `torch.max`."""
    if not args and not kwargs and eligible_reduction(input) and input.numel() >= SMALLEST:
        return amax(input)
    return extreme_with_index(SMALLEST, torch.max, torch.return_types.max, input, *args, **kwargs)


@op.public
def public(x: Tensor) -> Tensor:
    return amax(x, -1)
