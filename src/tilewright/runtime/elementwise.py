"""Elementwise kernels: which tensors they take, and how a matrix is tiled."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.crossovers import Crossover
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.sizes import cdiv, next_power_of_2

MIN_BLOCK_N = 256  # columns of a tile in a longer row: 512 contiguous bytes, and little is lost at the end of a row
INTERNAL_OVERLAP = 1  # torch's code for a tensor whose elements share memory
LARGE = 2**23  # elements from which a call has many waves of programs
MAX_GRID_Y = 2**16 - 1


def eligible_elementwise(crossover: Crossover | None, *tensors: Any) -> bool:
    """Return whether our kernels can take these as torch would: contiguous tensors of one shape, not too small."""
    first, *others = tensors
    if not isinstance(first, Tensor):
        return False
    if crossover is not None:
        device, size = first.get_device(), first.numel()
        if not crossover.reached(size, device):
            return False
    if not eligible(*tensors):
        return False
    for other in others:
        if other.shape != first.shape or not other.is_contiguous():
            return False
    return first.is_contiguous()


def can_write_in_place(*tensors: Tensor) -> bool:
    """Return whether a kernel may write to one of these with no other effect than on its version counter."""
    return (
        not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and not torch._C._len_torch_dispatch_stack()
        and (torch.is_inference_mode_enabled() or not any(t.is_inference() for t in tensors))
        and all(torch._debug_has_internal_overlap(t) != INTERNAL_OVERLAP for t in tensors)
    )


def size_bucket(elements: int) -> str:
    """Return the key under which sizes share a configuration."""
    return "large" if elements >= LARGE else "small"


def as_rows(x: Tensor) -> Tensor:
    """Return x as [M, N] with contiguous rows; a copy only where its last dimension is strided."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def tile_shape(M: int, N: int, block: int) -> tuple[int, int]:
    """Return rows and columns of a tile of `block` elements of [M, N]; the columns divide N where they can."""
    columns = block if M == 1 else max(min(N & -N, block), min(MIN_BLOCK_N, next_power_of_2(N)))
    return max(1, block // columns), columns


def tile_grid(M: int, N: int, BLOCK_M: int, BLOCK_N: int) -> tuple[int, int, int]:
    """Return the grid that `tile_start` expects: columns, then rows in as many z steps as the grid's limit requires."""
    rows = cdiv(M, BLOCK_M)
    steps = next_power_of_2(cdiv(rows, MAX_GRID_Y))
    return cdiv(N, BLOCK_N), cdiv(rows, steps), steps


@triton.jit
def tile_start(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row and column of this program's tile, without a division, which costs more than a ReLU."""
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return row.to(tl.int64) * BLOCK_M, tl.program_id(0).to(tl.int64) * BLOCK_N
