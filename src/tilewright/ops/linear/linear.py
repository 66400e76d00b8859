"""Linear layer with ReLU in its epilogue: y = relu(x wᵀ + b), or y = x wᵀ + b.

The epilogue applies bias and ReLU to the fp32 accumulators while they are in registers, so only the result goes through
memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.configs import cached_plan
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import Launcher, PreparedLaunch, shared_memory
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["linear"]


def reference(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    y = F.linear(x, weight, bias)
    return torch.relu(y) if relu else y


def cost(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Cost:
    (M, K), N = x.shape, weight.shape[0]
    return Cost(
        read=x.nbytes + weight.nbytes + bias.nbytes,
        written=M * N * x.element_size(),
        flops={matrix_unit(x.dtype): 2 * M * N * K},
    )


def backward_cost(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Cost:
    (M, K), N = x.shape, weight.shape[0]
    results = M * N * x.element_size()
    return Cost(
        read=x.nbytes
        + weight.nbytes
        + results * (2 if relu else 1),  # ReLU's gradient needs to know which results were positive
        written=x.nbytes + weight.nbytes + bias.nbytes,
        flops={matrix_unit(x.dtype): 4 * M * N * K},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor, bool]:
    if not draw["relu"]:
        return draw.randn("M", "K"), draw.randn("N", "K", scale=draw["K"] ** -0.5), draw.randn("N"), False
    # ReLU's gradient jumps at 0, so no sum may round across it: x and w are multiples of 1/64, and the bias is an
    # odd multiple of 1/8192. Every sum is then exact in fp32, and none is 0.
    x, weight = (draw.randn(rows, "K", scale=64).round() / 64 for rows in "MN")
    bias = (2 * draw.randn("N", scale=50).round().clamp(-128, 127) + 1) / 8192
    return x, weight, bias, True


op = Op(
    "linear",
    reference,
    cost,
    inputs=inputs,
    check=[
        case
        for relu in (False, True)
        for case in points(M=(1, 3, 64, 70, 129), N=(1, 5, 64, 130, 65), K=(1, 7, 64, 67, 256), relu=(relu,) * 5)
    ],
    bench=points(
        M=(1024, 4096, 8192, 8192),
        N=(256, 4096, 8192, 14336),
        K=(512, 4096, 8192, 4096),
        relu=(True,) * 4,
    ),
    backward_cost=backward_cost,
    batch="M",
)


@triton.jit
def _linear_matmul(
    a_ptr, b_ptr, bias_ptr, c_ptr, stride_am, stride_ak, stride_bk, stride_bn, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs take GROUP_M rows of tiles column by column, so that those in flight share rows of a and columns of b
    # in L2.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(0) // tiles_in_group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    index = tl.program_id(0) % tiles_in_group
    start_m = (first_m + index % rows) * BLOCK_M
    start_n = index // rows * BLOCK_N

    # Rows past the end wrap around: the loop needs no boundary masks, and their results are never stored.
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # int64: M * K may exceed 2**31
    a_ptrs = a_ptr + (offs_m % M).to(tl.int64)[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + (offs_n % N).to(tl.int64)[None, :] * stride_bn
    step = tl.full([], BLOCK_K, tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(offs_k < K - start_k)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(offs_k < K - start_k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk

    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        acc = tl.where(acc < 0, 0.0, acc)  # a maximum would drop NaN
    c_ptrs = c_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


SMS = 132  # multiprocessors of an H200
GROUP_M = 8
# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: the first that gives every SM a tile, else the last. Shared memory
# limits the stages.
TILES = {
    "half": ((128, 128, 64, 4, 3), (64, 64, 64, 4, 4), (64, 32, 128, 4, 4)),
    "tf32": ((128, 128, 32, 8, 4), (64, 64, 32, 4, 4)),
    "ieee": ((128, 128, 16, 8, 3), (64, 64, 32, 4, 3)),
}


def _tile(M: int, N: int, unit: str) -> tuple[int, int, int, int, int]:
    for tile in TILES[unit]:
        if cdiv(M, tile[0]) * cdiv(N, tile[1]) >= SMS:
            return tile
    return TILES[unit][-1]


_launch = Launcher(_linear_matmul)


@cached_plan
def _plan(
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    precision: str,
    has_bias: bool,
    relu: bool,
) -> PreparedLaunch:
    """Return the launch that takes a [M, K] and b [K, N] of these strides, bias and c."""
    M, N, K = sizes
    block_m, block_n, block_k, warps, stages = _tile(M, N, precision if dtype == torch.float32 else "half")
    stages = min(stages, shared_memory(device) // ((block_m + block_n) * block_k * dtype.itemsize))
    return _launch.prepare(
        (cdiv(M, block_m) * cdiv(N, block_n),), *strides, M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M, EVEN_K=K % block_k == 0,
        HAS_BIAS=has_bias, RELU=relu, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return c = a b, plus the bias, then ReLU; a and b may have any strides."""
    M, K = a.shape
    N = b.shape[1]
    c = a.new_empty(M, N)
    if c.numel():
        a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))  # vector loads need a contiguous dimension
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        strides = *a.stride(), *b.stride()
        _plan((M, N, K), strides, a.dtype, a.get_device(), precision, bias is not None, relu)(a, b, bias, c)
    return c


CUDA = CudaSource("linear/linear.cu", "linear_fwd")
CUDA_TILE = 128  # rows and columns of a block's tile, as in linear.cu
CUDA_THREADS = 256


def _triton(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    return _matmul(x, weight.t(), bias.contiguous(), relu)


def _cuda(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    tiles = cdiv(M, CUDA_TILE) * cdiv(N, CUDA_TILE)
    if tiles:
        numbers = M, N, K, int(relu)
        CUDA.prepare("linear_fwd", x.dtype, x.get_device(), (tiles,), CUDA_THREADS, *numbers)(x, weight, bias, y)
    return y


FORMS = {"triton": _triton, "cuda": _cuda}


@operator("linear", fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]))
def linear_forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, form: str) -> Tensor:
    """Linear of x [M, K], weight [N, K] and bias [N], with ReLU if wanted: y [M, N]."""
    return FORMS[form](x, weight, bias, relu)


@operator("linear_matmul", fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
def linear_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The GEMM a b by the Triton kernel of `linear`, whose gradients are two of these."""
    return _matmul(a, b, None, False)


def _save(ctx, inputs, output) -> None:
    x, weight, _, ctx.relu, ctx.form = inputs
    ctx.save_for_backward(x, weight, output if ctx.relu else None)


def _backward(ctx, dy: Tensor):
    x, weight, y = ctx.saved_tensors
    dz = torch.ops.aten.threshold_backward(dy, y, 0) if ctx.relu else dy
    # Double backward: torch differentiates its own GEMM again.
    matmul = linear_matmul if ctx.form == "triton" and not torch.is_grad_enabled() else torch.mm
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    return (
        matmul(dz, weight) if needs_x else None,
        matmul(dz.t(), x) if needs_weight else None,
        dz.sum(0) if needs_bias else None,
    )


linear_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_tiled(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    return linear_forward(x, weight, bias, relu, "triton")


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    return linear_forward(x, weight, bias, relu, "cuda")


# FMAs from which on fusing pays: none yet. Where our kernel is faster than torch's two, on small matrices, our call
# costs the host more than it saves. cuBLAS's fused ReLU is no alternative: it turns NaN into 0.
SMALLEST = math.inf
FUSED = "triton"  # the form that `linear` calls


def _is_eligible(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (input, weight) if bias is None else (input, weight, bias)
    return (
        input.dim() > 0
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and input.numel() * weight.shape[0] >= SMALLEST
        and eligible(*tensors)
    )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """Linear layer, with the arguments of `torch.nn.functional.linear`, then an activation: None or "relu"."""
    if activation not in (None, "relu"):
        raise ValueError(f'activation must be None or "relu", not {activation!r}')
    if activation is None:
        return F.linear(input, weight, bias)
    if not _is_eligible(input, weight, bias):
        return torch.relu(F.linear(input, weight, bias))
    N, K = weight.shape
    x, bias = input.reshape(input.shape[:-1].numel(), K), weight.new_zeros(N) if bias is None else bias
    y = linear_forward(x, weight, bias, True, FUSED)
    return y.view(*input.shape[:-1], N)
