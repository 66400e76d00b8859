"""Sums in Numba: over the threads of a block, and over parts of rows."""

from __future__ import annotations

import functools
from typing import Any

from tilewright.runtime.numba import numba_cuda

NUMBA_THREADS = 128


@functools.cache
def numba_tree_sum() -> Any:
    """Return a Numba function that sums one value per thread of the block, for any number of threads."""
    global nb
    nb = numba_cuda()
    from numba import float32

    @nb.jit(device=True)
    def tree_sum(value):
        shared = nb.shared.array(1024, float32)
        lane, width = nb.threadIdx.x, nb.blockDim.x
        shared[lane] = value
        nb.syncthreads()
        while width > 1:  # add the upper half to the lower; an odd width leaves out the middle one
            half = (width + 1) // 2
            if lane < width - half:
                shared[lane] += shared[lane + half]
            nb.syncthreads()
            width = half
        return shared[0]

    return tree_sum


@functools.cache
def numba_sum_chunks() -> Any:
    """Return a Numba kernel: out [M, chunks] = the sums of the chunks of the rows of x [M, N]."""
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
