"""Smallest element over dimensions; NaN if there is one. Equal elements share the gradient.

`min` is torch's older function: over a dimension it also returns the index, and the gradient goes to that element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import DIMENSIONS, reduction_op
from tilewright.ops.reduce._operators import dispatch, eligible_reduction, extreme_with_index, reduce
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["amin", "min"]


def reference(x: Tensor) -> Tensor:
    return torch.amin(x, dim=-1)


op = reduction_op("amin", reference)


@op.kernel("triton", language="triton")
def triton_amin(x: Tensor) -> Tensor:
    return reduce(x, (1,), "amin")


CROSSOVER = Crossover("amin", faster_after(us=0.44, bytes_per_element=2), captured=always)


def amin(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Smallest element over dimensions, with the arguments of `torch.amin`."""
    dims = None if dim == () else tuple(dim) if type(dim) is list else dim
    y = dispatch(CROSSOVER, (dims, keepdim, "amin"), input) if out is None else None
    return torch.amin(input, dim, keepdim, out=out) if y is None else y


def min(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Smallest element, with its index over a dimension, in all forms of `torch.min`."""
    if not args and not kwargs and eligible_reduction(input) and CROSSOVER.reached(input.numel(), input.get_device()):
        return amin(input)
    return extreme_with_index(CROSSOVER, torch.min, torch.return_types.min, input, *args, **kwargs)


@op.public
def public(x: Tensor) -> Tensor:
    return amin(x, -1)


op.over(torch.amin, amin, DIMENSIONS)
