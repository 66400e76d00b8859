"""Bias add and activation: y = f(x + b), b along the last dimension.

torch writes x + b to memory and reads it again, rounded to the dtype of x. Here the sum stays in registers, in fp32.
The gradient of the bias is the sum of the input's over all rows: each program keeps partial sums of its columns, and a
second kernel adds them. Shapes alone fix the order of summation.

Users call it as `relu`, `silu`, `gelu` and so on with `bias=`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._unary import BIAS_CROSSOVER, FORMULAS, bias_activation, dispatch, flops, with_bias
from tilewright.spec import Cost, Op, grid, points


def reference(x: Tensor, bias: Tensor, act: str) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)  # one rounding, at the end
    return FORMULAS[act](x.to(wide) + bias.to(wide)).to(x.dtype)


def cost(x: Tensor, bias: Tensor, act: str) -> Cost:
    return Cost(read=x.nbytes + bias.nbytes, written=x.nbytes, flops=flops(act, x.numel(), more=1))


def backward_cost(x: Tensor, bias: Tensor, act: str) -> Cost:
    fp32 = flops(act, x.numel(), backward=True, more=2)
    return Cost(read=2 * x.nbytes + bias.nbytes, written=x.nbytes + bias.nbytes, flops=fp32)


op = Op(
    "bias_activation",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N", scale=2.0), draw.randn("N"), draw["act"]),
    check=[*grid(M=(1, 33), N=(1, 60), act=tuple(FORMULAS)), *points(M=(3001, 5), N=(16, 3001), act=("silu", "relu"))],
    bench=grid(M=(16384,), N=(8192,), act=("relu", "silu", "gelu_tanh", "gelu")),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "intermediate"},
)


@op.kernel("triton", language="triton")
def triton_bias_activation(x: Tensor, bias: Tensor, act: str) -> Tensor:
    return bias_activation(x, bias, act)


@op.public
def public(x: Tensor, bias: Tensor, act: str) -> Tensor:
    y = dispatch(BIAS_CROSSOVER, act, x, bias)
    return FORMULAS[act](with_bias(x, bias)) if y is None else y
