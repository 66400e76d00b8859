"""ReLU: y = max(x, 0); NaN stays NaN.

One comparison per element, so it is memory-bound. The gradient follows from the result, which the next layer keeps
anyway, so the input need not be saved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.ops.activation._unary import activate_in_place, activation, activation_op, dispatch, with_bias

__all__ = ["relu"]


def reference(x: Tensor) -> Tensor:
    return torch.nn.functional.relu(x)


op = activation_op("relu", reference)


@op.kernel("triton", language="triton")
def triton_relu(x: Tensor) -> Tensor:
    return activation(x, "relu")


SMALLEST = math.inf  # elements: torch's own kernel reaches the ceiling


def relu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """ReLU of `input + bias`, with the arguments of `torch.nn.functional.relu`."""
    if inplace:
        y = activate_in_place(SMALLEST if bias is None else 0, "relu", input, bias)
    else:
        y = dispatch(SMALLEST, "relu", input) if bias is None else dispatch(0, "relu", input, bias)
    if y is not None:
        return y
    return torch.nn.functional.relu(with_bias(input, bias, inplace=inplace), inplace=inplace)


op.public(relu)
