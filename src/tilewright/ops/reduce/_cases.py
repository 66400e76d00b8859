"""The Op of a reduction over the last dimension: costs, inputs and cases that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.spec import Cost, Op, points

CHECK = points(
    M=(1, 3, 1, 5, 1, 3, 1, 3, 1061, 5003),
    N=(1, 1, 2, 193, 781, 4097, 300007, 20011, 67, 7),
)
BENCH = points(M=(1, 4096, 65536, 2**22), N=(2**28, 65536, 4096, 64))


DIMENSIONS = (0, 1, (0, 1), (0, 2), (1, 2))  # `bench --random` reduces [A, N, B] over these


def cost(x: Tensor, *_: Any) -> Cost:
    """The cost of a reduction over the last dimension."""
    return Cost(read=x.nbytes, written=_rows(x) * x.element_size(), flops={"fp32": x.numel()})


def index_cost(x: Tensor) -> Cost:
    """The cost of finding an index in the last dimension."""
    return Cost(read=x.nbytes, written=_rows(x) * torch.int64.itemsize, flops={"fp32": x.numel()})


def backward_cost(x: Tensor, *_: Any) -> Cost:
    """The cost of a gradient that differs from element to element."""
    return Cost(read=x.nbytes + 2 * _rows(x) * x.element_size(), written=x.nbytes, flops={"fp32": 2 * x.numel()})


def expanded_cost(x: Tensor, *_: Any) -> Cost:
    """The cost of a gradient that is the incoming one, expanded without a copy."""
    return Cost(read=0, written=0)


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def reduction_op(name: str, reference: Callable[..., Tensor], **more: Any) -> Op:
    """Return the Op of a reduction of a matrix over its last dimension; `more` replaces what differs."""
    shared: dict[str, Any] = {
        "cost": cost,
        "inputs": lambda draw: (draw.randn("M", "N"),),
        "check": CHECK,
        "bench": BENCH,
        "backward_cost": backward_cost,
        "batch": "M",
        "draws": {"N": "row"},
    }
    return Op(name, reference, **shared | more)
