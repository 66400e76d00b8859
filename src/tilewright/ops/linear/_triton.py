"""GEMM kernels in Triton, shared by `matmul` and `linear`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.activation._unary import activation_of
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import DescribedLaunch, Launcher, Matrix, PreparedLaunch, shared_memory, stored
from tilewright.runtime.sizes import cdiv

GROUP_M = 8  # rows of tiles


@triton.jit
def _tile_at(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column of a tile: groups of GROUP_M rows, column by column.

    The programs in flight then share rows of a and columns of b in L2. With GROUP_M = 1 the order is row by row, and
    they share a single row of a.
    """
    tiles_in_group = GROUP_M * tiles_n
    first_m = index // tiles_in_group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    index = index % tiles_in_group
    return first_m + index % rows, index // rows


@triton.jit
def _matmul_fwd(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, stride_am, stride_ak, stride_bk, stride_bn, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N

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

    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "none":
        acc = activation_of(acc, ACTIVATION, c_ptr.dtype.element_ty.primitive_bitwidth)
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(c_ptr + offs, acc.to(c_ptr.dtype.element_ty), mask=inside)


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: the first that gives every SM a tile, else the last. Shared memory
# limits the stages.
TILES = {
    "half": ((128, 128, 64, 4, 3), (64, 64, 64, 4, 4), (64, 32, 128, 4, 4)),
    "tf32": ((128, 128, 32, 8, 4), (64, 64, 32, 4, 4)),
    "ieee": ((128, 128, 16, 8, 3), (64, 64, 32, 4, 3)),
}


def _tile(M: int, N: int, unit: str, sms: int) -> tuple[int, int, int, int, int]:
    for tile in TILES[unit]:
        if cdiv(M, tile[0]) * cdiv(N, tile[1]) >= sms:
            return tile
    return TILES[unit][-1]


_launch_fwd = Launcher(_matmul_fwd)


@cached_plan
def _plan(
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    precision: str,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    group: int,
) -> PreparedLaunch:
    """Return the launch that takes a [M, K] and b [K, N] of these strides, bias, residual and c."""
    M, N, K = sizes
    unit = precision if dtype == torch.float32 else "half"
    block_m, block_n, block_k, warps, stages = _tile(M, N, unit, gpu_facts(device).sms)
    stages = min(stages, shared_memory(device) // ((block_m + block_n) * block_k * dtype.itemsize))
    return _launch_fwd.prepare(
        (cdiv(M, block_m) * cdiv(N, block_n),), *strides, M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group, EVEN_K=K % block_k == 0,
        ACTIVATION=activation, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _precision() -> str:
    """Return how fp32 is multiplied, as torch is set."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    group: int = GROUP_M,
) -> Tensor:
    """Return activation(a b + bias) + residual. a and b have any strides, bias and residual [M, N] are contiguous."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))  # vector loads need a contiguous dimension
    where = a.dtype, a.get_device(), _precision()
    launch = _plan(
        (M, N, K), (*a.stride(), *b.stride()), *where, activation, bias is not None, residual is not None, group
    )
    launch(a, b, bias, residual, c)
    return c


@triton.jit
def _matmul_persistent(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # One loop over the steps of all tiles, so that the first loads of a tile overlap the store of the one before.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
        start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start_k in range(0, K, BLOCK_K):  # a descriptor fills what is out of bounds with zeros
            a = a_desc.load([start_k, start_m]).T if TRANSPOSED_A else a_desc.load([start_m, start_k])
            b = b_desc.load([start_n, start_k]).T if TRANSPOSED_B else b_desc.load([start_k, start_n])
            acc = tl.dot(a, b, acc)
        c_desc.store([start_m, start_n], acc.to(c_desc.dtype))


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: the first whose slices and tile of c fit in shared memory.
PERSISTENT = ((128, 256, 64, 8, 3), (128, 128, 32, 8, 3))


def _persistent_tile(shared: int) -> tuple[int, int, int, int, int]:
    for tile in PERSISTENT:
        block_m, block_n, block_k, _, stages = tile
        if 2 * ((block_m + block_n) * block_k * stages + block_m * block_n) <= shared:
            return tile
    return PERSISTENT[-1]


@cached_plan
def _persistent_plan(
    sizes: tuple[int, int, int], steps: tuple[int, int], transposed: tuple[bool, bool], dtype: torch.dtype, device: int
) -> DescribedLaunch:
    """Return the launch that takes a [M, K], b [K, N] and c of this dtype, with rows this many elements apart."""
    M, N, K = sizes
    block_m, block_n, block_k, warps, stages = _persistent_tile(shared_memory(device))
    programs = min(gpu_facts(device).sms, cdiv(M, block_m) * cdiv(N, block_n))
    matrices = (
        stored((M, K), steps[0], (block_m, block_k), transposed[0]),
        stored((K, N), steps[1], (block_k, block_n), transposed[1]),
        Matrix((M, N), N, (block_m, block_n)),
    )
    return DescribedLaunch(
        _matmul_persistent, (programs,), matrices, M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M,
        TRANSPOSED_A=transposed[0], TRANSPOSED_B=transposed[1], num_warps=warps, num_stages=stages,
    )  # fmt: skip


def persistent(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, for matrices of 16-bit floats that satisfy `rows_are_aligned`."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    transposed = a.stride(1) != 1, b.stride(1) != 1
    steps = max(a.stride()), max(b.stride())
    _persistent_plan((M, N, K), steps, transposed, a.dtype, a.get_device())(a, b, c)
    return c
