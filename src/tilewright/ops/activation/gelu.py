"""GELU: y = x P(Z < x) for a normal Z, or its approximation by tanh.

It is memory-bound only if an element takes few instructions, so both forms need one exponential.

none: P(Z < -|x|) = exp(-x^2 / 2) p(1 / (1 + 0.336 |x|)), p the polynomial of degree 7 nearest to the scaled erfc. It is
shorter than erf and keeps its precision in the left tail, where 1 + erf cancels.

tanh: y = x (1 + tanh(a)) / 2 = x / (1 + exp(-2a)), a = sqrt(2/pi) (x + 0.044715 x^3). Where this exponential overflows
the quotient is zero, as it should be; exp(2a) / (1 + exp(2a)) would be NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.ops.activation._unary import BIAS_CROSSOVER, GELUS, activation, dispatch, flops, with_bias
from tilewright.runtime.crossovers import Crossover, faster_after
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Op, grid, points

APPROXIMATIONS = tuple(GELUS)

__all__ = ["gelu"]


def reference(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def cost(x: Tensor, approximate: str) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops=flops(GELUS[approximate], x.numel()))


def backward_cost(x: Tensor, approximate: str) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops=flops(GELUS[approximate], x.numel(), backward=True))


op = Op(
    "gelu",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N", scale=2.0), draw["approximate"]),
    check=grid(N=(1, 781, 4096, 50021), approximate=APPROXIMATIONS),
    bench=points(N=(2**20, 2**24, 2**28, 2**28), approximate=("tanh", "tanh", "tanh", "none")),
    backward_cost=backward_cost,
    batch="N",
)


@op.kernel("manual", origin="baseline")
def manual(x: Tensor, approximate: str) -> Tensor:
    """Written out in PyTorch: each operation makes a round trip through memory."""
    wide = x.float()
    if approximate == "none":
        return (0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


CUDA = CudaSource("activation/gelu.cu", "gelu_none_fwd", "gelu_tanh_fwd", "gelu_none_bwd", "gelu_tanh_bwd")
CUDA_THREADS = 256
CUDA_BYTES = 32  # per input and thread


def _cuda(kernel: str, *tensors: Tensor) -> None:
    x = tensors[0]
    blocks = cdiv(x.nbytes, CUDA_THREADS * CUDA_BYTES)
    CUDA.prepare(kernel, x.dtype, x.get_device(), (blocks,), CUDA_THREADS, x.numel())(*tensors)


@operator("gelu_cuda", fake=contiguous_like)
def gelu_cuda(x: Tensor, approximate: str) -> Tensor:
    """GELU in CUDA C++."""
    y = contiguous_like(x)
    if x.numel():
        _cuda(f"gelu_{approximate}_fwd", x.contiguous(), y)
    return y


@operator("gelu_cuda_backward", fake=contiguous_like)
def gelu_cuda_backward(x: Tensor, dy: Tensor, approximate: str) -> Tensor:
    """The gradient of the input from the input and the output's gradient."""
    dx = contiguous_like(x)
    if x.numel():
        _cuda(f"gelu_{approximate}_bwd", x.contiguous(), dy.contiguous(), dx)
    return dx


def _save(ctx, inputs, output) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy: Tensor):
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        return torch.ops.aten.gelu_backward(dy, x, approximate=ctx.approximate)
    return gelu_cuda_backward(x, dy, ctx.approximate)


gelu_cuda.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_gelu(x: Tensor, approximate: str) -> Tensor:
    return activation(x, GELUS[approximate])


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor, approximate: str) -> Tensor:
    return gelu_cuda(x, approximate)


CROSSOVER = Crossover("gelu", faster_after(us=1.75, bytes_per_element=4))


def gelu(input: Tensor, approximate: str = "none", *, bias: Tensor | None = None) -> Tensor:
    """GELU of `input + bias`, with the arguments of `torch.nn.functional.gelu`."""
    if approximate in APPROXIMATIONS:
        act = GELUS[approximate]
        y = dispatch(CROSSOVER, act, input) if bias is None else dispatch(BIAS_CROSSOVER, act, input, bias)
        if y is not None:
            return y
    return torch.nn.functional.gelu(with_bias(input, bias), approximate=approximate)


op.public(gelu)
