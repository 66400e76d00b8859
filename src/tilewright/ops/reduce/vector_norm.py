"""Norm over dimensions: y = (sum of |x|^p over each row)^(1/p).

For p = inf and -inf it is the largest and the smallest |x|, for p = 0 the number of nonzero elements. The gradient is
x |x|^(p-2) / y^(p-1); for p = inf and -inf, the elements with |x| = y share it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import reduction_op
from tilewright.ops.reduce._operators import Reduce, dispatch, reduce, reduce_backward
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.spec import points

__all__ = ["vector_norm"]


def reference(x: Tensor, ord: str) -> Tensor:
    return torch.linalg.vector_norm(x, float(ord), dim=-1)


op = reduction_op(
    "vector_norm",
    reference,
    inputs=lambda draw: (draw.randn("M", "N"), draw["ord"]),
    check=points(
        M=(1, 3, 1, 5, 3, 3, 1061, 5003, 3, 5, 5),
        N=(1, 1, 33, 193, 20011, 4097, 67, 7, 20011, 67, 67),
        ord=("2", "3", "0.5", "inf", "2", "1", "2", "inf", "2.5", "0", "-inf"),
    ),
    bench=points(M=(1, 4096, 65536, 2**22, 65536), N=(2**28, 65536, 4096, 64, 4096), ord=("2", "2", "2", "2", "1")),
)


def _kind(ord: float) -> str:
    return f"norm{ord:.0f}" if ord in (0, 1, 2, math.inf, -math.inf) else "normp"


@op.kernel("triton", language="triton")
def triton_vector_norm(x: Tensor, ord: str) -> Tensor:
    return reduce(x, (1,), _kind(float(ord)), p=float(ord))


@op.also
def gradients_of_columns_and_of_rows_that_start_anywhere(device: str) -> None:
    for shape in ((64, 4096, 256), (4096, 333)):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        y = reduce(x, (1,), "norm2")
        reduce_backward(x, y, y, None, Reduce((1,), False, "norm2"))


CROSSOVER = Crossover("vector_norm", faster_after(us=0.44, bytes_per_element=2), captured=always)


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm over dimensions, with the arguments of `torch.linalg.vector_norm`."""
    if out is None and type(ord) in (int, float) and ord == ord:
        dims = tuple(dim) if type(dim) is list else dim
        y = dispatch(CROSSOVER, (dims, keepdim, _kind(ord), float(ord), dtype), x)
        if y is not None:
            return y
    return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype, out=out)


@op.public
def public(x: Tensor, ord: str) -> Tensor:
    return vector_norm(x, float(ord), -1)
