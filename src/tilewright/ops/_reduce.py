"""What reductions share: how rows are cut into pieces, the sum of short rows, and a tree over a block's threads."""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._numba import numba_cuda

PROGRAMS = 4224  # 32 for each of an H200's 132 multiprocessors
TILE = 4096  # elements of short rows that share a program


def split(M: int, N: int, block: int) -> tuple[int, int]:
    """The length of the pieces that programs take of a row of N, and their number.

    Shapes alone decide, so that the order of summation, and with it every bit of the result, is always the same.
    """
    if M >= PROGRAMS // 4:  # the rows are enough to fill the GPU
        return N, 1
    blocks = triton.cdiv(N, block)
    each = triton.cdiv(M * blocks, PROGRAMS)
    return each * block, triton.cdiv(blocks, each)


@triton.jit
def _sum_tile(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may pass 2**31
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
    tl.store(y_ptr + offs_m, tl.sum(x.to(tl.float32), axis=1).to(y_ptr.dtype.element_ty), mask=offs_m < M)


def sum_tiles(x: Tensor, y: Tensor) -> None:
    """y [M] = the sums of the rows of x [M, N], each of which must fit into one program."""
    M, N = x.shape
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    warps = max(4, block // 1024)
    _sum_tile[(triton.cdiv(M, rows),)](x, y, M, N, BLOCK_M=rows, BLOCK_N=block, num_warps=warps)


NUMBA_THREADS = 128


@functools.cache
def numba_tree_sum() -> Any:
    """A Numba function: the sum of one value from each of the block's threads, for any number of threads."""
    global nb
    nb = numba_cuda()
    from numba import float32

    @nb.jit(device=True)
    def tree_sum(value):
        shared = nb.shared.array(1024, float32)
        lane, width = nb.threadIdx.x, nb.blockDim.x
        shared[lane] = value
        nb.syncthreads()
        while width > 1:  # the upper half onto the lower; of an odd width the middle one waits
            half = (width + 1) // 2
            if lane < width - half:
                shared[lane] += shared[lane + half]
            nb.syncthreads()
            width = half
        return shared[0]

    return tree_sum


@functools.cache
def numba_sum_chunks() -> Any:
    """A Numba kernel: out [M, chunks] = the sums of the pieces of the rows of x [M, N]."""
    global nb
    nb = numba_cuda()
    from numba import float32

    tree_sum = numba_tree_sum()

    @nb.jit
    def sum_chunks(x, out, chunk):
        row, piece = nb.blockIdx.x, nb.blockIdx.y
        end = min((piece + 1) * chunk, x.shape[1])
        total = float32(0)
        for n in range(piece * chunk + nb.threadIdx.x, end, nb.blockDim.x):
            total += x[row, n]
        total = tree_sum(total)
        if nb.threadIdx.x == 0:
            out[row, piece] = total

    return sum_chunks
