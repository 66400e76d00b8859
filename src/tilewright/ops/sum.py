"""Sum over trailing dimensions: y = sum of x over each row.

Reading x once is all the work, so what matters is that every multiprocessor always has loads in flight. Short rows:
several to a program. Many long rows: one to a program, in a loop. Few long rows: each is cut into pieces, and a second
kernel adds the pieces' sums; no atomics, so the same input always gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._cuda import Source
from tilewright.ops._flat import takes
from tilewright.ops._numba import launch
from tilewright.ops._reduce import NUMBA_THREADS, numba_sum_chunks, split, sum_tiles
from tilewright.spec import Cost, Op, points

SHORT_ROW = 2048  # elements up to which rows are summed as tiles


def reference(x: Tensor) -> Tensor:
    return torch.sum(x, dim=-1)


def cost(x: Tensor) -> Cost:
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(read=x.nbytes, written=rows * x.element_size(), flops={"fp32": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=0, written=0)  # the incoming gradient, expanded without a copy


op = Op(
    "sum",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=points(
        M=(1, 3, 1, 5, 1, 3, 1, 3, 1061, 5003),
        N=(1, 1, 2, 193, 781, 4097, 300007, 20011, 67, 7),
    ),
    bench=points(M=(1, 4096, 65536, 2**22), N=(2**28, 65536, 4096, 64)),
    backward_cost=backward_cost,
    batch="M",
)


@triton.jit
def _sum_chunk(x_ptr, y_ptr, N, chunk, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: M * N may pass 2**31
    piece = tl.program_id(1).to(tl.int64)
    begin = row * N + piece * chunk
    end = row * N + tl.minimum((piece + 1) * chunk, N)
    # A row of any length: from the first multiple of 16 on, accesses are 16 bytes wide.
    first = tl.multiple_of((begin + 15) // 16 * 16, 16)
    rest = first + tl.maximum(end - first, 0) // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(first, rest, BLOCK_N):
        total += tl.load(x_ptr + start + offs_n).to(tl.float32)
    if rest < end:
        total += tl.load(x_ptr + rest + offs_n, mask=rest + offs_n < end, other=0.0).to(tl.float32)
    y = tl.sum(total, axis=0)
    if begin < first:
        offs_head = begin + tl.arange(0, 16)
        head = tl.load(x_ptr + offs_head, mask=offs_head < tl.minimum(first, end), other=0.0)
        y += tl.sum(head.to(tl.float32), axis=0)
    tl.store(y_ptr + row * tl.num_programs(1) + piece, y.to(y_ptr.dtype.element_ty))


BLOCK_N = 4096


def _triton(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    if N <= SHORT_ROW:
        sum_tiles(x, y)
        return
    chunk, chunks = split(M, N, BLOCK_N)
    partial = y if chunks == 1 else torch.empty(M, chunks, dtype=torch.float32, device=x.device)
    _sum_chunk[(M, chunks)](x, partial, N, chunk, BLOCK_N=BLOCK_N, num_warps=4)
    if chunks > 1:
        sum_tiles(partial, y)


CUDA = Source("sum.cu", "sum_whole", "sum_chunks", "sum_partials")
CUDA_THREADS = 256  # any number is right
CUDA_BLOCK = 16384  # pieces of rows are multiples of it


def _cuda(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    room = 4 * CUDA_THREADS  # bytes of shared memory: a float for each thread
    chunk, chunks = split(M, N, CUDA_BLOCK)
    if chunks == 1:
        lanes = min(CUDA_THREADS, triton.next_power_of_2(triton.cdiv(x.element_size() * N, 16)))
        blocks = triton.cdiv(M, CUDA_THREADS // lanes)
        CUDA.launch("sum_whole", x.dtype, (blocks,), CUDA_THREADS, x, y, M, N, lanes, shared=room)
        return
    partial = torch.empty(M, chunks, dtype=torch.float32, device=x.device)
    CUDA.launch("sum_chunks", x.dtype, (M, chunks), CUDA_THREADS, x, partial, M, N, chunk, shared=room)
    CUDA.launch("sum_partials", x.dtype, (M,), CUDA_THREADS, partial, y, M, chunks, shared=room)


def _numba(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    chunk, chunks = split(M, N, BLOCK_N)
    partial = y if chunks == 1 else torch.empty(M, chunks, dtype=torch.float32, device=x.device)
    threads = min(N, NUMBA_THREADS)
    launch(numba_sum_chunks(), (M, chunks), threads, x, partial.view(M, chunks), chunk)
    if chunks > 1:
        launch(numba_sum_chunks(), (M, 1), threads, partial, y.view(M, 1), chunks)


FORMS = {"triton": _triton, "cuda": _cuda, "numba": _numba}


@torch.library.custom_op("tilewright::sum", mutates_args=())
def sum_forward(x: Tensor, form: str) -> Tensor:
    """The sum over the last dimension by the named form."""
    if x.numel() == 0:
        return torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        FORMS[form](x.contiguous().view(-1, x.shape[-1]), y.view(-1))
    return y


@sum_forward.register_fake
def _(x: Tensor, form: str) -> Tensor:
    return x.new_empty(x.shape[:-1])


def _save(ctx, inputs, output) -> None:
    ctx.shape = inputs[0].shape


def _backward(ctx, grad: Tensor):
    return grad.unsqueeze(-1).expand(ctx.shape), None


sum_forward.register_autograd(_backward, setup_context=_save)


@op.kernel("triton", language="triton")
def triton_sum(x: Tensor) -> Tensor:
    return sum_forward(x, "triton")


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor) -> Tensor:
    return sum_forward(x, "cuda")


@op.kernel("numba", language="numba", fits=lambda x: x.dtype == torch.float32, differentiable=False)
def numba(x: Tensor) -> Tensor:
    return sum_forward(x, "numba")


SMALLEST = 2**28  # elements; below this a call costs the host more than our kernel saves


def _trailing(rank: int, dim: Any) -> int:
    """How many trailing dimensions `dim` names, or 0 if it names anything else."""
    dims = dim if isinstance(dim, tuple | list) else () if dim is None else (dim,)
    if not all(type(d) is int and -rank <= d < rank for d in dims):
        return 0
    named = sorted(d % rank for d in dims) or [*range(rank)]  # none named: all are meant
    return len(named) if named == [*range(rank - len(named), rank)] else 0


def sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.sum`: the fast kernels over trailing dimensions, where they fit; torch elsewhere."""
    if takes(SMALLEST, input) and dtype in (None, input.dtype) and (count := _trailing(input.dim(), dim)):
        y = sum_forward(input.flatten(-count), "triton")
        return y.reshape(*y.shape, *[1] * count) if keepdim else y
    if dim is None and not keepdim:  # two overloads: some kinds of tensor have only this one
        return torch.sum(input, dtype=dtype)
    return torch.sum(input, dim, keepdim, dtype=dtype)
