"""GELU: y = x P(Z < x) for a normal Z, or its approximation by tanh.

Memory binds it only if an element costs few instructions, so both forms are built around one exponential.

none: P(Z < -|x|) = exp(-x^2 / 2) p(1 / (1 + 0.336 |x|)), p the polynomial of degree 7 nearest to the scaled erfc. It is
shorter than erf and keeps its precision in the left tail, where 1 + erf cancels.

tanh: y = x (1 + tanh(a)) / 2 = x / (1 + exp(-2a)), a = sqrt(2/pi) (x + 0.044715 x^3). Where this exponential overflows
the quotient is zero, as it should be; exp(2a) / (1 + exp(2a)) would be NaN.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._cuda import Source
from tilewright.ops._flat import takes
from tilewright.spec import Cost, Op, grid, points

APPROXIMATIONS = ("none", "tanh")


def reference(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def cost(x: Tensor, approximate: str) -> Cost:
    fp32 = 20 if approximate == "none" else 8
    return Cost(read=x.nbytes, written=x.nbytes, flops={"fp32": fp32 * x.numel(), "special": x.numel()})


def backward_cost(x: Tensor, approximate: str) -> Cost:
    fp32 = 24 if approximate == "none" else 18
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops={"fp32": fp32 * x.numel(), "special": x.numel()})


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


@op.kernel("manual", is_baseline=True)
def manual(x: Tensor, approximate: str) -> Tensor:
    """Written out in PyTorch: each operation through memory."""
    wide = x.float()
    if approximate == "none":
        return (0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


@triton.jit
def _normal_tail(x):
    """P(Z < -|x|) for a normal Z, and exp(-x^2 / 2)."""
    t = 1.0 / (1.0 + tl.abs(0.336 * x))  # abs last: the compiler sees that nothing here is small and divides plainly
    p = 0.047817265 * t - 0.22098947
    p = p * t + 0.31441771
    p = p * t - 0.078385019
    p = p * t + 0.1812564
    p = p * t + 0.12026365
    p = p * t + 0.13570264
    p = p * t - 8.3162312e-5
    bell = tl.exp2(x * (-0.72134752 * x))  # log2(e) / 2
    return bell * p, bell


@triton.jit
def _tanh_odds(x):
    """2a log2(e): the logarithm to base 2 of s / (1 - s), where gelu = x s."""
    return x * (2.3022082 + 0.10294324 * (x * x))


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        return x / (1.0 + tl.exp2(-_tanh_odds(x)))
    else:
        tail, _ = _normal_tail(x)
        return x * tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        odds = _tanh_odds(x)
        e = tl.exp2(-tl.abs(odds))
        larger = 1.0 / (1.0 + e)  # of s and 1 - s
        s = tl.where(odds > 0, larger, e * larger)
        near = tl.minimum(tl.maximum(x, -16.0), 16.0)  # beyond, e is zero
        return s + e * larger * larger * near * (1.5957691 + 0.21406445 * (near * near))
    else:
        tail, bell = _normal_tail(x)
        return tl.where(x > 0, 1.0 - tail, tail) + 0.39894228 * (x * bell)


@triton.jit
def _gelu_fwd(x_ptr, y_ptr, N, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK_N  # int64: N may pass 2**31
    offs_n = start + tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= N:  # without a mask the accesses stay 16 bytes wide whatever N is
        x = tl.load(x_ptr + offs_n).to(tl.float32)
        tl.store(y_ptr + offs_n, _gelu(x, TANH).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N).to(tl.float32)
        tl.store(y_ptr + offs_n, _gelu(x, TANH).to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _gelu_bwd(x_ptr, dy_ptr, dx_ptr, N, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= N:
        x = tl.load(x_ptr + offs_n).to(tl.float32)
        dy = tl.load(dy_ptr + offs_n).to(tl.float32)
        tl.store(dx_ptr + offs_n, (dy * _gelu_slope(x, TANH)).to(dx_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N).to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, mask=offs_n < N).to(tl.float32)
        tl.store(dx_ptr + offs_n, (dy * _gelu_slope(x, TANH)).to(dx_ptr.dtype.element_ty), mask=offs_n < N)


BLOCK_N = 2048

CUDA = Source("gelu.cu", "gelu_none_fwd", "gelu_tanh_fwd", "gelu_none_bwd", "gelu_tanh_bwd")
CUDA_THREADS = 256
CUDA_BYTES = 32  # of each input that a thread takes at a time


def _cuda_blocks(x: Tensor) -> int:
    return triton.cdiv(x.nbytes, CUDA_THREADS * CUDA_BYTES)


@torch.library.custom_op("tilewright::gelu", mutates_args=())
def gelu_forward(x: Tensor, approximate: str, form: str) -> Tensor:
    """GELU by the named form."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x.contiguous()
    N = x.numel()
    if N:
        with torch.cuda.device_of(x):
            if form == "cuda":
                CUDA.launch(f"gelu_{approximate}_fwd", x.dtype, (_cuda_blocks(x),), CUDA_THREADS, x, y, N)
            else:
                config = {"TANH": approximate == "tanh", "BLOCK_N": BLOCK_N, "num_warps": 4}
                _gelu_fwd[(triton.cdiv(N, BLOCK_N),)](x, y, N, **config)
    return y


@gelu_forward.register_fake
def _(x: Tensor, approximate: str, form: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("tilewright::gelu_backward", mutates_args=())
def gelu_backward(x: Tensor, dy: Tensor, approximate: str, form: str) -> Tensor:
    """The gradient of GELU's input from that input and the output's gradient."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, dy = x.contiguous(), dy.contiguous()
    N = x.numel()
    if N:
        with torch.cuda.device_of(x):
            if form == "cuda":
                CUDA.launch(f"gelu_{approximate}_bwd", x.dtype, (_cuda_blocks(x),), CUDA_THREADS, x, dy, dx, N)
            else:
                config = {"TANH": approximate == "tanh", "BLOCK_N": BLOCK_N, "num_warps": 4}
                _gelu_bwd[(triton.cdiv(N, BLOCK_N),)](x, dy, dx, N, **config)
    return dx


@gelu_backward.register_fake
def _(x: Tensor, dy: Tensor, approximate: str, form: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    x, ctx.approximate, ctx.form = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy: Tensor):
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        return torch.ops.aten.gelu_backward(dy, x, approximate=ctx.approximate), None, None
    return gelu_backward(x, dy, ctx.approximate, ctx.form), None, None


gelu_forward.register_autograd(_backward, setup_context=_save)


@op.kernel("triton", language="triton")
def triton_gelu(x: Tensor, approximate: str) -> Tensor:
    return gelu_forward(x, approximate, "triton")


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor, approximate: str) -> Tensor:
    return gelu_forward(x, approximate, "cuda")


SMALLEST = 2**26  # elements; below this a call costs the host more than our kernel saves


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """As `torch.nn.functional.gelu`: the fast kernel where it fits, torch elsewhere."""
    # Inductor fuses torch's gelu with its neighbours; it could not look into ours.
    if torch.compiler.is_compiling() or approximate not in APPROXIMATIONS or not takes(SMALLEST, input):
        return torch.nn.functional.gelu(input, approximate=approximate)
    return gelu_forward(input, approximate, "triton")
