"""Copy with a grid that is rounded down: `tilewright audit` shows the rows and columns that are never written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 32


@triton.jit
def _copy(x_ptr, y_ptr, N, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = rows[:, None] * N + cols[None, :]
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def copy(x: Tensor) -> Tensor:
    M, N = x.shape
    y = torch.empty_like(x)
    _copy[(M // TILE, N // TILE)](x, y, N, TILE)
    return y
