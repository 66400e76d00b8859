"""Logarithm of softmax over a dimension: y = x - max x - log sum exp(x - max x).

The kernels of softmax with LOG set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.softmax._operators import (
    MAX_TILE,
    Softmax,
    dispatch,
    fits_cluster,
    softmax_forward,
)
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.spec import Cost, Op, grid, points

__all__ = ["log_softmax"]


def reference(x: Tensor) -> Tensor:
    return torch.log_softmax(x, dim=-1)


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops={"fp32": 4 * x.numel(), "special": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops={"fp32": 3 * x.numel(), "special": x.numel()})


op = Op(
    "log_softmax",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N", scale=3.0),),
    check=[*grid(M=(1, 67), N=(1, 2, 781, 4096)), *points(M=(2, 1), N=(16400, 70001))],
    bench=points(
        M=(65536, 32768, 16384, 16384, 8192, 4096, 2048, 512),
        N=(256, 1024, 4096, 8192, 32768, 65536, 131072, 262144),
    ),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "row"},
)


def _has_columns(x: Tensor) -> bool:
    return x.shape[-1] > 0


@op.kernel("triton-online", language="triton", fits=_has_columns)
def online(x: Tensor) -> Tensor:
    return softmax_forward(x, Softmax(-1, log=True, form="online"))


@op.kernel("triton", language="triton", fits=lambda x: 0 < x.shape[-1] <= MAX_TILE)
def tile(x: Tensor) -> Tensor:
    return softmax_forward(x, Softmax(-1, log=True, form="tile"))


@op.kernel("cuda", language="cuda", fits=lambda x: _has_columns(x) and fits_cluster(x))
def cluster(x: Tensor) -> Tensor:
    return softmax_forward(x, Softmax(-1, log=True, form="cluster"))


CROSSOVER = Crossover("log_softmax", faster_after(us=1.75, bytes_per_element=4), captured=always)


def log_softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of softmax over a dimension, with the arguments of `torch.nn.functional.log_softmax`."""
    same_dtype = dtype is None or dtype == getattr(input, "dtype", None)
    y = dispatch(CROSSOVER, (dim, True), input) if same_dtype and type(dim) is int else None
    return torch.nn.functional.log_softmax(input, dim=dim, dtype=dtype) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return log_softmax(x, -1)


op.over(torch.log_softmax, log_softmax, (0, 1))
