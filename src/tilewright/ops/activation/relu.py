"""ReLU: y = max(x, 0); NaN stays NaN.

One comparison per element, so it is memory-bound. The gradient follows from the result, which the next layer keeps
anyway, so the input need not be saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._unary import (
    BIAS_CROSSOVER,
    activate_in_place,
    activation,
    activation_op,
    dispatch,
    with_bias,
)
from tilewright.runtime.crossovers import Crossover, never

__all__ = ["relu"]


def reference(x: Tensor) -> Tensor:
    return torch.nn.functional.relu(x)


op = activation_op("relu", reference)


@op.kernel("triton", language="triton")
def triton_relu(x: Tensor) -> Tensor:
    return activation(x, "relu")


CROSSOVER = Crossover("relu", never)


def relu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """ReLU of `input + bias`, with the arguments of `torch.nn.functional.relu`."""
    if inplace:
        y = activate_in_place(CROSSOVER if bias is None else BIAS_CROSSOVER, "relu", input, bias)
    else:
        y = dispatch(CROSSOVER, "relu", input) if bias is None else dispatch(BIAS_CROSSOVER, "relu", input, bias)
    if y is not None:
        return y
    return torch.nn.functional.relu(with_bias(input, bias, inplace=inplace), inplace=inplace)


op.public(relu)
