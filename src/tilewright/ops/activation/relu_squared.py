"""Squared ReLU: y = max(x, 0)², and NaN stays NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._unary import activation, by_ours, flops, with_bias
from tilewright.spec import Cost, Op, grid


def reference(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops=flops("relu_squared", x.numel()))


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops=flops("relu_squared", x.numel(), backward=True))


op = Op(
    "relu_squared",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N"),),
    check=grid(N=(1, 781, 4096, 50021)),
    bench=grid(N=(2**20, 2**24, 2**28)),
    backward_cost=backward_cost,
    batch="N",
)


@op.kernel("triton", language="triton")
def triton_relu_squared(x: Tensor) -> Tensor:
    return activation(x, "relu_squared")


SMALLEST = 0  # elements: one launch costs the host less than torch's two, and no input is too small for that


def relu_squared(input: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """max(input, 0)², of input + bias if given: the fast kernel where it fits, torch elsewhere."""
    y = by_ours(SMALLEST, input, bias, "relu_squared")
    return torch.relu(with_bias(input, bias)).square() if y is None else y


op.public(relu_squared)
