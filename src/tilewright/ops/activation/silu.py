"""SiLU, or swish: y = x / (1 + exp(-x)).

Where the exponential overflows the quotient is zero, as it should be; x exp(x) / (1 + exp(x)) would be NaN on the other
side. The derivative is s + y (1 - s) with s = 1 / (1 + exp(-x)): one exponential in both directions.
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
from tilewright.runtime.crossovers import Crossover, always, faster_after

__all__ = ["silu"]


def reference(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


op = activation_op("silu", reference, inputs=lambda draw: (draw.randn("N", scale=2.0),))


@op.kernel("triton", language="triton")
def triton_silu(x: Tensor) -> Tensor:
    return activation(x, "silu")


CROSSOVER = Crossover("silu", faster_after(us=1.75, bytes_per_element=4), captured=always)


def silu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """SiLU of `input + bias`, with the arguments of `torch.nn.functional.silu`."""
    if inplace:
        y = activate_in_place(CROSSOVER if bias is None else BIAS_CROSSOVER, "silu", input, bias)
    else:
        y = dispatch(CROSSOVER, "silu", input) if bias is None else dispatch(BIAS_CROSSOVER, "silu", input, bias)
    if y is not None:
        return y
    return torch.nn.functional.silu(with_bias(input, bias, inplace=inplace), inplace=inplace)


op.public(silu)
