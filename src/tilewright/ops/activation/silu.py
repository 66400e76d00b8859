"""SiLU, or swish: y = x / (1 + exp(-x)).

Where the exponential overflows the quotient is zero, as it should be; x exp(x) / (1 + exp(x)) would be NaN on the other
side. The slope is s + y (1 - s) with s = 1 / (1 + exp(-x)): one exponential in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._unary import activation, by_ours, flops, with_bias
from tilewright.spec import Cost, Op, grid


def reference(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops=flops("silu", x.numel()))


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops=flops("silu", x.numel(), backward=True))


op = Op(
    "silu",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N", scale=2.0),),
    check=grid(N=(1, 781, 4096, 50021)),
    bench=grid(N=(2**20, 2**24, 2**28)),
    backward_cost=backward_cost,
    batch="N",
)


@op.kernel("triton", language="triton")
def triton_silu(x: Tensor) -> Tensor:
    return activation(x, "silu")


SMALLEST = 2**21  # elements; below this torch takes less time than our call costs the host


def silu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.silu`, of input + bias if given: the fast kernel where it fits, torch elsewhere."""
    y = by_ours(SMALLEST, input, bias, "silu", inplace=inplace)
    if y is not None:
        return y
    return torch.nn.functional.silu(with_bias(input, bias, inplace=inplace), inplace=inplace)


op.public(silu)
