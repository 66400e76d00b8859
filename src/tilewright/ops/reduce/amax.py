"""Largest element over dimensions; NaN if there is one. Equal elements share the gradient.

`max` is torch's older function: over a dimension it also returns the index, and the gradient goes to that element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import DIMENSIONS, reduction_op
from tilewright.ops.reduce._operators import dispatch, eligible_reduction, extreme_with_index, reduce
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["amax", "max"]


def reference(x: Tensor) -> Tensor:
    return torch.amax(x, dim=-1)


op = reduction_op("amax", reference)


@op.kernel("triton", language="triton")
def triton_amax(x: Tensor) -> Tensor:
    return reduce(x, (1,), "amax")


CROSSOVER = Crossover("amax", faster_after(us=0.44, bytes_per_element=2), captured=always)


def amax(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Largest element over dimensions, with the arguments of `torch.amax`."""
    dims = None if dim == () else tuple(dim) if type(dim) is list else dim
    y = dispatch(CROSSOVER, (dims, keepdim, "amax"), input) if out is None else None
    return torch.amax(input, dim, keepdim, out=out) if y is None else y


def max(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Largest element, with its index over a dimension, in all forms of `torch.max`."""
    if not args and not kwargs and eligible_reduction(input) and CROSSOVER.reached(input.numel(), input.get_device()):
        return amax(input)
    return extreme_with_index(CROSSOVER, torch.max, torch.return_types.max, input, *args, **kwargs)


@op.public
def public(x: Tensor) -> Tensor:
    return amax(x, -1)


op.over(torch.amax, amax, DIMENSIONS)
