"""Where the largest element of a dimension is: the first of equals, and a NaN before all.

Each lane keeps the largest element it has met and its place; lanes and pieces are put together by value and place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.reduce._operators import BENCH, CHECK, reduce_index, reduced
from tilewright.spec import Cost, Op


def reference(x: Tensor) -> Tensor:
    return torch.argmax(x, dim=-1)


def cost(x: Tensor) -> Cost:
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(read=x.nbytes, written=rows * torch.int64.itemsize, flops={"fp32": x.numel()})


op = Op(
    "argmax",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=CHECK,
    bench=BENCH,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_argmax(x: Tensor) -> Tensor:
    return reduce_index(x, 1, 2, False, "argmax")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """As `torch.argmax`: the fast kernels where they fit, torch elsewhere."""
    y = reduced(SMALLEST, input, dim, keepdim, "argmax") if dim is None or type(dim) is int else None
    return torch.argmax(input, dim, keepdim) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return argmax(x, -1)
