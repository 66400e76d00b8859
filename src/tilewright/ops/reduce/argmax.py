"""Index of the largest element of a dimension: the first of equal elements; a NaN wins.

Each lane keeps its largest element and that element's index; lanes and parts are combined by value, then by index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import index_cost, reduction_op
from tilewright.ops.reduce._operators import Reduce, dispatch, reduce_index
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["argmax"]


def reference(x: Tensor) -> Tensor:
    return torch.argmax(x, dim=-1)


op = reduction_op("argmax", reference, cost=index_cost, backward_cost=None)


@op.kernel("triton", language="triton")
def triton_argmax(x: Tensor) -> Tensor:
    return reduce_index(x, Reduce((1,), False, "argmax"))


CROSSOVER = Crossover("argmax", faster_after(us=0.44, bytes_per_element=2), captured=always)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index of the largest element, with the arguments of `torch.argmax`."""
    y = dispatch(CROSSOVER, (dim, keepdim, "argmax"), input) if dim is None or type(dim) is int else None
    return torch.argmax(input, dim, keepdim) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return argmax(x, -1)


op.over(torch.argmax, argmax, (0, 1))
