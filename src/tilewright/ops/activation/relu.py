"""ReLU: y = max(x, 0), and NaN stays NaN.

One comparison an element: memory alone binds it. Its gradient is taken from the result, which the layer that follows
keeps anyway, so the input need not be kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.ops.activation._unary import activation, by_ours, flops, with_bias
from tilewright.spec import Cost, Op, grid


def reference(x: Tensor) -> Tensor:
    return torch.nn.functional.relu(x)


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops=flops("relu", x.numel()))


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops=flops("relu", x.numel(), backward=True))


op = Op(
    "relu",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N"),),
    check=grid(N=(1, 781, 4096, 50021)),
    bench=grid(N=(2**20, 2**24, 2**28)),
    backward_cost=backward_cost,
    batch="N",
)


@op.kernel("triton", language="triton")
def triton_relu(x: Tensor) -> Tensor:
    return activation(x, "relu")


SMALLEST = math.inf  # elements; torch's own kernel runs at the ceiling already


def relu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.relu`, of input + bias if given: the fast kernel where it fits, torch elsewhere."""
    y = by_ours(SMALLEST, input, bias, "relu", inplace=inplace)
    if y is not None:
        return y
    return torch.nn.functional.relu(with_bias(input, bias, inplace=inplace), inplace=inplace)


op.public(relu)
