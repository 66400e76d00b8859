"""What the operations on plain runs of memory share: when a call may leave torch's own path for ours, and how rows
that lie apart are cut into tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.eligibility import runs_here
from tilewright.runtime.sizes import cdiv, next_power_of_2

NARROWEST = 256  # columns of a tile where rows are longer: 512 bytes in a run, and little is lost where a row ends
OVERLAPS = 1  # as torch says that elements of a tensor share memory
LARGE = 2**23  # elements; above, a call is many waves of programs
MOST_DOWN = 2**16 - 1  # programs along the second dimension of a grid


def takes(smallest: float, *tensors: Any) -> bool:
    """Whether our kernels can take these as torch would: tensors of one shape, each a run of memory without gaps."""
    first, *others = tensors
    if not isinstance(first, Tensor) or first.numel() < smallest:
        return False
    for other in others:
        if not isinstance(other, Tensor):
            return False
    if not runs_here(*tensors):
        return False
    for other in others:
        if other.shape != first.shape or not other.is_contiguous():
            return False
    return first.is_contiguous()


def may_change(*tensors: Tensor) -> bool:
    """Whether a kernel may write into one of these: nobody has to hear of it but its version counter."""
    return (
        not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and not torch._C._len_torch_dispatch_stack()
        and (torch.is_inference_mode_enabled() or not any(t.is_inference() for t in tensors))
        and all(torch._debug_has_internal_overlap(t) != OVERLAPS for t in tensors)
    )


def bucket(elements: int) -> str:
    """The sizes that share a configuration."""
    return "large" if elements >= LARGE else "small"


def as_rows(x: Tensor) -> Tensor:
    """[M, N] with the elements of a row side by side; a copy only where x does not lie so."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def tile_shape(M: int, N: int, block: int) -> tuple[int, int]:
    """Rows and columns of a tile of `block` elements of [M, N]; the columns divide N where they can."""
    columns = block if M == 1 else max(min(N & -N, block), min(NARROWEST, next_power_of_2(N)))
    return max(1, block // columns), columns


def tiles(M: int, N: int, BLOCK_M: int, BLOCK_N: int) -> tuple[int, int, int]:
    """The grid for `tile`: across and, in as many steps as a launch needs, down."""
    down = cdiv(M, BLOCK_M)
    steps = next_power_of_2(cdiv(down, MOST_DOWN))  # which tiles of many rows fill, if anything does
    return cdiv(N, BLOCK_N), cdiv(down, steps), steps


@triton.jit
def tile(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where this program's tile of [M, N] begins. Nothing is divided, which would take longer than some activations."""
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return row.to(tl.int64) * BLOCK_M, tl.program_id(0).to(tl.int64) * BLOCK_N
