"""Transposed copy of a matrix: y[n, m] = x[m, n].

Loads and stores are both coalesced only if a tile is transposed on the chip, in shared memory. There it is either
written or read by columns, and the layout of a column over the banks decides how long that takes: see
`docs/bank-conflicts.md`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.configs import cached_plan
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Op, points


def reference(x: Tensor) -> Tensor:
    return x.t().contiguous()


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes)


op = Op(
    "transpose",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=points(M=(1, 64, 33, 1, 301), N=(1, 64, 31, 257, 130)),
    bench=points(M=(1024, 8192, 16384), N=(1024, 8192, 16384)),
    backward_cost=cost,
    bench_dtypes=("float32",),  # an element fills a bank
)


CUDA = CudaSource("transpose.cu", "transpose_fwd<T, Plain>", "transpose_fwd<T, Padded>", "transpose_fwd<T, Swizzled>")
CUDA_TILE = 32  # rows and columns, as in transpose.cu
CUDA_THREADS = 256


def _cuda(x: Tensor, y: Tensor, tile: str) -> None:
    M, N = x.shape
    tiles = cdiv(N, CUDA_TILE)
    blocks = cdiv(M, CUDA_TILE) * tiles
    kernel = f"transpose_fwd<T, {tile}>"
    CUDA.prepare(kernel, x.dtype, x.get_device(), (blocks,), CUDA_THREADS, M, N, tiles)(x, y)


@triton.jit
def _transpose_fwd(x_ptr, y_ptr, M, N, tiles, BLOCK: tl.constexpr):
    """The compiler converts between the layouts of load and store through shared memory, and swizzles it."""
    tile = tl.program_id(0).to(tl.int64)  # int64: M * N may exceed 2**31
    offs_m = tile // tiles * BLOCK + tl.arange(0, BLOCK)
    offs_n = tile % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=inside)  # [BLOCK, BLOCK]
    tl.store(y_ptr + offs_n[:, None] * M + offs_m[None, :], tl.trans(x), mask=tl.trans(inside))


BLOCK = 64

_launch = Launcher(_transpose_fwd)


@cached_plan
def _plan(M: int, N: int, dtype: torch.dtype, device: int) -> PreparedLaunch:
    tiles = cdiv(N, BLOCK)
    return _launch.prepare((cdiv(M, BLOCK) * tiles,), M, N, tiles, BLOCK=BLOCK, num_warps=4)


FORMS = {
    "cuda": lambda x, y: _cuda(x, y, "Plain"),
    "cuda-padded": lambda x, y: _cuda(x, y, "Padded"),
    "cuda-swizzled": lambda x, y: _cuda(x, y, "Swizzled"),
    "triton": lambda x, y: _plan(*x.shape, x.dtype, x.get_device())(x, y),
}


def _transposed_like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


@operator("transpose", fake=_transposed_like)
def transpose_forward(x: Tensor, form: str) -> Tensor:
    """The transposed copy of a matrix."""
    y = _transposed_like(x)
    if x.numel():
        FORMS[form](x.contiguous(), y)
    return y


def _save(ctx, inputs, output) -> None:
    ctx.form = inputs[1]


def _backward(ctx, dy: Tensor):
    return transpose_forward(dy, ctx.form)


transpose_forward.differentiate(_save, _backward)


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor) -> Tensor:
    return transpose_forward(x, "cuda")


@op.kernel("cuda-padded", language="cuda")
def cuda_padded(x: Tensor) -> Tensor:
    return transpose_forward(x, "cuda-padded")


@op.kernel("cuda-swizzled", language="cuda")
def cuda_swizzled(x: Tensor) -> Tensor:
    return transpose_forward(x, "cuda-swizzled")


@op.kernel("triton", language="triton")
def triton_transpose(x: Tensor) -> Tensor:
    return transpose_forward(x, "triton")
