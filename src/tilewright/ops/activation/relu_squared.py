"""Squared ReLU: y = max(x, 0)²; NaN stays NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._unary import activation, activation_op, dispatch, with_bias
from tilewright.runtime.crossovers import Crossover, always

__all__ = ["relu_squared"]


def reference(x: Tensor) -> Tensor:
    return torch.relu(x).square()


op = activation_op("relu_squared", reference)


@op.kernel("triton", language="triton")
def triton_relu_squared(x: Tensor) -> Tensor:
    return activation(x, "relu_squared")


CROSSOVER = Crossover("relu_squared", always)


def relu_squared(input: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """max(input + bias, 0)²."""
    y = dispatch(CROSSOVER, "relu_squared", input, *(() if bias is None else (bias,)))
    return torch.relu(with_bias(input, bias)).square() if y is None else y


op.public(relu_squared)
