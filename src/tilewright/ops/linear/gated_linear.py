"""Gated linear layer: y = activation(x gᵀ) (x uᵀ), the first half of the feed-forward layer of most language models.

A tile of the gate and the same tile of the other product share every slice of x, and meet in registers: x is read once,
and y is all that is written. Where gradients are needed, the two products are written too, side by side in one tensor
z [M, 2N], so that backward needs no product twice and has one GEMM for both weight gradients.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.activation._gated import gated_backward
from tilewright.ops.activation._unary import FORMULAS, activation_of, flops
from tilewright.ops.activation.geglu import geglu
from tilewright.ops.activation.reglu import reglu
from tilewright.ops.activation.swiglu import swiglu
from tilewright.ops.linear._triton import GROUP_M, _precision, _tile_at
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover, never
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import Launcher, PreparedLaunch, shared_memory
from tilewright.runtime.operator import needs_gradient, operator, scatter
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["gated_linear"]


def reference(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Tensor:
    return FORMULAS[activation](F.linear(x, gate_weight)) * F.linear(x, up_weight)


def cost(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Cost:
    (M, K), N = x.shape, gate_weight.shape[0]
    return Cost(
        read=x.nbytes + gate_weight.nbytes + up_weight.nbytes,
        written=M * N * x.element_size(),
        flops={matrix_unit(x.dtype): 4 * M * N * K, "special": flops(activation, M * N)["special"]},
    )


def backward_cost(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Cost:
    (M, K), N = x.shape, gate_weight.shape[0]
    weights = gate_weight.nbytes + up_weight.nbytes
    return Cost(
        read=x.nbytes + weights + 3 * M * N * x.element_size(),  # gate, up and the incoming gradient
        written=x.nbytes + weights,
        flops={matrix_unit(x.dtype): 8 * M * N * K, "special": flops(activation, M * N, backward=True)["special"]},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor, str]:
    weights = (draw.randn("N", "K", scale=draw["K"] ** -0.5) for _ in range(2))
    return draw.randn("M", "K"), *weights, draw["activation"]


op = Op(
    "gated_linear",
    reference,
    cost,
    inputs=inputs,
    check=points(
        M=(1, 3, 64, 70, 129, 136),
        N=(1, 5, 64, 130, 65, 72),
        K=(1, 7, 64, 67, 256, 72),
        # Not relu: its gradient jumps at 0, where the gate may be rounded to either side.
        activation=("silu", "gelu", "gelu_tanh", "relu_squared", "silu", "silu"),
    ),
    bench=points(
        M=(4096, 8192, 8192),
        N=(8192, 14336, 14336),
        K=(2048, 4096, 4096),
        activation=("silu", "silu", "gelu_tanh"),
    ),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "intermediate", "K": "hidden"},
)


@triton.jit
def _gated_linear_fwd(
    x_ptr, gate_ptr, up_ptr, y_ptr, z_ptr,
    stride_xm, stride_xk, stride_gn, stride_gk, stride_un, stride_uk, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # int64: M * K may exceed 2**31
    # Rows past the end wrap around: the loop needs no boundary masks, and their results are never stored.
    rows_n = (offs_n % N).to(tl.int64)
    x_ptrs = x_ptr + (offs_m % M).to(tl.int64)[:, None] * stride_xm + offs_k[None, :] * stride_xk
    gate_ptrs = gate_ptr + offs_k[:, None] * stride_gk + rows_n[None, :] * stride_gn
    up_ptrs = up_ptr + offs_k[:, None] * stride_uk + rows_n[None, :] * stride_un
    step = tl.full([], BLOCK_K, tl.int64)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            x, g, u = tl.load(x_ptrs), tl.load(gate_ptrs), tl.load(up_ptrs)
        else:
            inside = offs_k < K - start_k
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
            g = tl.load(gate_ptrs, mask=inside[:, None], other=0.0)
            u = tl.load(up_ptrs, mask=inside[:, None], other=0.0)
        gate = tl.dot(x, g, gate, input_precision=PRECISION)
        up = tl.dot(x, u, up, input_precision=PRECISION)
        x_ptrs += step * stride_xk
        gate_ptrs += step * stride_gk
        up_ptrs += step * stride_uk

    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    row = offs_m.to(tl.int64)[:, None] * N
    if z_ptr is not None:
        offs = 2 * row + offs_n[None, :]
        tl.store(z_ptr + offs, gate.to(z_ptr.dtype.element_ty), mask=inside)
        tl.store(z_ptr + offs + N, up.to(z_ptr.dtype.element_ty), mask=inside)
    y = activation_of(gate, ACTIVATION, y_ptr.dtype.element_ty.primitive_bitwidth) * up
    tl.store(y_ptr + row + offs_n[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: the first that gives every SM a tile and fits in shared memory, else
# the last. A program has two tiles of sums, so each is half of what a plain GEMM would have.
TILES = {
    "half": ((128, 128, 64, 8, 4), (128, 64, 64, 8, 3), (64, 64, 32, 4, 4), (64, 32, 32, 4, 4)),
    "tf32": ((128, 64, 32, 8, 3), (64, 32, 32, 8, 3)),
    "ieee": ((64, 64, 16, 8, 3), (32, 32, 16, 4, 3)),
}
UNALIGNED_K = 32  # where loads are narrow, each takes the registers of an address, and deeper slices spill


def _tile(M: int, N: int, K: int, unit: str, itemsize: int, device: int) -> tuple[int, int, int, int, int]:
    sms, memory = gpu_facts(device).sms, shared_memory(device)
    tiles = [(m, n, min(k, UNALIGNED_K) if K % 16 else k, *others) for m, n, k, *others in TILES[unit]]
    for tile in tiles:
        block_m, block_n, block_k, _, stages = tile
        fits = (block_m + 2 * block_n) * block_k * stages * itemsize <= memory
        if fits and cdiv(M, block_m) * cdiv(N, block_n) >= sms:
            return tile
    return tiles[-1]


_launch = Launcher(_gated_linear_fwd)


@cached_plan
def _plan(
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    precision: str,
    activation: str,
    keeps: bool,
) -> PreparedLaunch:
    """Return the launch that takes x, gate and up weight of these strides, y, and z if it keeps it, else None."""
    M, N, K = sizes
    unit = precision if dtype == torch.float32 else "half"
    block_m, block_n, block_k, warps, stages = _tile(M, N, K, unit, dtype.itemsize, device)
    return _launch.prepare(
        (cdiv(M, block_m) * cdiv(N, block_n),), *strides, M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M, EVEN_K=K % block_k == 0,
        ACTIVATION=activation, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _results(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str, keeps: bool) -> tuple[Tensor, Tensor]:
    M, N = x.shape[0], gate_weight.shape[0]
    return x.new_empty(M, N), x.new_empty(M if keeps else 0, 2 * N)


@operator("gated_linear", fake=_results)
def gated_linear_forward(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str, keeps: bool
) -> tuple[Tensor, Tensor]:
    """The result [M, N] of x [M, K] and two weights [N, K]; and gate and up [M, 2N] if it keeps them for backward."""
    y, z = _results(x, gate_weight, up_weight, activation, keeps)
    if y.numel():
        # Vector loads need a contiguous dimension.
        x, gate_weight, up_weight = (t if 1 in t.stride() else t.contiguous() for t in (x, gate_weight, up_weight))
        strides = *x.stride(), *gate_weight.stride(), *up_weight.stride()
        (M, N), K = y.shape, x.shape[1]
        launch = _plan((M, N, K), strides, x.dtype, x.get_device(), _precision(), activation, keeps)
        launch(x, gate_weight, up_weight, y, z if keeps else None)
    return y, z


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.keeps = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy: Tensor, _: object):
    x, gate_weight, up_weight, z = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # double backward: torch differentiates the reference
        leaves = [t.view_as(t) for t in (x, gate_weight, up_weight)]  # distinct, even if both weights are one tensor
        needed = [leaf for leaf, needs in zip(leaves, wanted, strict=True) if needs]
        found = torch.autograd.grad(reference(*leaves, ctx.activation), needed, dy, create_graph=True)
        return tuple(scatter(found, wanted))
    if not ctx.keeps:
        z = torch.cat([F.linear(x, gate_weight), F.linear(x, up_weight)], 1)
    (dz,) = gated_backward(z, None, dy, ctx.activation)
    dgate, dup = dz.chunk(2, 1)
    dx = torch.addmm(dgate @ gate_weight, dup, up_weight) if wanted[0] else None
    dweights = dz.t() @ x if wanted[1] and wanted[2] else None  # x is read once for both
    if dweights is not None:
        return dx, *dweights.chunk(2)
    return dx, dgate.t() @ x if wanted[1] else None, dup.t() @ x if wanted[2] else None


gated_linear_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Tensor:
    keeps = needs_gradient(x, gate_weight, up_weight)
    return gated_linear_forward(x, gate_weight, up_weight, activation, keeps)[0]


GATED = {"silu": swiglu, "gelu": geglu, "gelu_tanh": partial(geglu, approximate="tanh"), "relu": reglu}

CROSSOVER = Crossover("gated_linear", never, unit="FMAs", size=lambda x, gate, *_: 2 * x.numel() * gate.shape[0])


def _is_eligible(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # which fuses the activation into its own GEMM
        and input.dim() > 0
        and gate_weight.dim() == 2
        and input.shape[-1] == gate_weight.shape[1]
        and CROSSOVER.reached(2 * input.numel() * gate_weight.shape[0], input.get_device())
        and eligible(input, gate_weight, up_weight)
    )


@op.public
def gated_linear(input: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str = "silu") -> Tensor:
    """activation(input @ gate_weight.T) * (input @ up_weight.T), for weights [N, K] as those of a linear layer.

    The activation is "relu", "relu_squared", "silu", "gelu" or "gelu_tanh".
    """
    if activation not in FORMULAS:
        raise ValueError(f"activation must be one of {', '.join(FORMULAS)}, not {activation!r}")
    for name, x in (("input", input), ("gate_weight", gate_weight), ("up_weight", up_weight)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if gate_weight.shape != up_weight.shape:
        shapes = f"{tuple(gate_weight.shape)} and {tuple(up_weight.shape)}"
        raise RuntimeError(f"the weights of gate and up must have the same shape, not {shapes}")
    if _is_eligible(input, gate_weight, up_weight):
        x = input.reshape(input.shape[:-1].numel(), input.shape[-1])
        y = triton_gated_linear(x, gate_weight, up_weight, activation)
        return y.view(*input.shape[:-1], gate_weight.shape[0])
    gate, up = F.linear(input, gate_weight), F.linear(input, up_weight)
    return GATED[activation](gate, up) if activation in GATED else FORMULAS[activation](gate) * up
