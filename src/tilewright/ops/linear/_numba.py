"""The tiled GEMM in Numba."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from tilewright.runtime.numba import launch, numba_cuda
from tilewright.runtime.sizes import cdiv

SIDE = 16  # rows and columns of a tile, and its threads


@functools.cache
def _matmul_tiled() -> Any:
    """Return a Numba kernel: a block computes a tile of c = a b, with slices of a and b in shared memory."""
    global nb
    nb = numba_cuda()
    from numba import float32

    side = SIDE

    @nb.jit
    def matmul_tiled(a, b, c):
        a_tile = nb.shared.array((side, side), float32)
        b_tile = nb.shared.array((side, side), float32)
        column, row = nb.threadIdx.x % side, nb.threadIdx.x // side
        m, n = nb.blockIdx.x * side + row, nb.blockIdx.y * side + column
        total = float32(0)
        for start_k in range(0, a.shape[1], side):
            a_tile[row, column] = a[m, start_k + column] if m < a.shape[0] and start_k + column < a.shape[1] else 0
            b_tile[row, column] = b[start_k + row, n] if start_k + row < b.shape[0] and n < b.shape[1] else 0
            nb.syncthreads()
            for k in range(side):
                total += a_tile[row, k] * b_tile[k, column]
            nb.syncthreads()
        if m < c.shape[0] and n < c.shape[1]:
            c[m, n] = total

    return matmul_tiled


def tiled(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Compute c = a b in fp32; a and b may have any strides."""
    grid = cdiv(c.shape[0], SIDE), cdiv(c.shape[1], SIDE)
    launch(_matmul_tiled(), grid, SIDE * SIDE, a, b, c)
