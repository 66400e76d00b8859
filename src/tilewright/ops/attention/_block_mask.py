"""Block sparsity of a mask_mod: which blocks of keys a block of queries sees in full, in part, or not at all."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.attention._formula import BOTTOM_RIGHT, Modes
from tilewright.ops.attention._mods import mod
from tilewright.ops.attention._score import seen
from tilewright.runtime.crossovers import is_captured
from tilewright.runtime.launch import Launcher
from tilewright.runtime.sizes import cdiv

FULL, PARTIAL, HIDDEN = (tl.constexpr(n) for n in range(3))


@triton.jit
def _classify_blocks(
    classes_ptr, begin_ptr, end_ptr, LQ, LK, left, right, offset,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK_MOD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Evaluate mask_mod on all pairs of a block."""
    blocks_n = tl.cdiv(LK, BLOCK_N)
    h = tl.program_id(1)
    b = tl.program_id(2)
    offs_m = tl.program_id(0) // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    i = offs_m[:, None]
    j = offs_n[None, :]
    row = tl.minimum(offs_m, LQ - 1)
    begin, end = seen(row, LK, left, right, offset, begin_ptr, end_ptr, HAS_LEFT, HAS_RIGHT)
    visible = (i < LQ) & (j >= begin[:, None]) & (j < end[:, None])
    visible = (visible & MASK_MOD(b.to(tl.int64), h.to(tl.int64), i, j)).to(tl.int32)
    count = tl.sum(tl.sum(visible, axis=1), axis=0)
    found = tl.where(count == BLOCK_M * BLOCK_N, FULL, tl.where(count == 0, HIDDEN, PARTIAL))
    number = (b * tl.num_programs(1) + h).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(classes_ptr + number, found.to(tl.int8))


_launch = Launcher(_classify_blocks)


class BlockLists(NamedTuple):
    """The blocks of the other side that each block of one side sees: those seen in full, then in part."""

    blocks: Tensor  # [B or 1, H or 1, blocks, other blocks]
    counts: Tensor  # [B or 1, H or 1, blocks, 2]: seen in full, and in part

    def strides(self) -> tuple[int, int]:
        """Return the strides of batch and head in rows of the lists; 0 where they share one."""
        B, H, blocks, _ = self.blocks.shape
        return (H * blocks if B > 1 else 0), (blocks if H > 1 else 0)


def block_lists(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    modes: Modes,
    sees: Tensor | None,
    blocks: tuple[int, int],
    device: torch.device,
    of_keys: bool,
) -> BlockLists:
    """Return the lists of each block of queries or, `of_keys`, of keys; once per shape unless there are documents.

    Each stream has lists of its own, since another one may read them before they are written. A CUDA graph computes
    its own too: it can be replayed after the cache has dropped them, and what is allocated while it is captured holds
    nothing before.
    """
    if sees is not None or is_captured():
        return _lists(heads, lengths, modes, sees, blocks, device, of_keys)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return _cached(heads, lengths, modes, blocks, device, of_keys, stream)


def _lists(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    modes: Modes,
    sees: Tensor | None,
    blocks: tuple[int, int],
    device: torch.device,
    of_keys: bool,
) -> BlockLists:
    (LQ, LK), (block_m, block_n) = lengths, blocks
    mask = mod(modes.mask_mod or "")
    B, H = (n if name in mask.uses else 1 for name, n in zip("bh", heads, strict=True))
    shape = cdiv(LQ, block_m), cdiv(LK, block_n)
    classes = torch.empty(B, H, *shape, dtype=torch.int8, device=device)
    bounds = (None, None) if sees is None else (sees[0], sees[1])
    config = {"MASK_MOD": mask.function, "BLOCK_M": block_m, "BLOCK_N": block_n}
    _launch((shape[0] * shape[1], H, B), classes, *bounds, LQ, LK, *diagonal(modes, LQ, LK), **sides(modes), **config)
    if of_keys:
        classes = classes.transpose(-1, -2)
    order = classes.argsort(dim=-1, stable=True).int()
    counts = torch.stack([(classes == n.value).sum(-1) for n in (FULL, PARTIAL)], -1).int()
    return BlockLists(order.contiguous(), counts.contiguous())


@functools.lru_cache(64)
def _cached(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    modes: Modes,
    blocks: tuple[int, int],
    device: torch.device,
    of_keys: bool,
    stream: int,
) -> BlockLists:
    return _lists(heads, lengths, modes, None, blocks, device, of_keys)


def diagonal(modes: Modes, LQ: int, LK: int) -> tuple[int, int, int]:
    """Return left, right and offset as the kernels take them."""
    left, right = (min(n or 0, LQ + LK) for n in (modes.left, modes.right))
    return left, right, LK - LQ if modes.diagonal == BOTTOM_RIGHT else 0


def sides(modes: Modes) -> dict[str, bool]:
    return {"HAS_LEFT": modes.left is not None, "HAS_RIGHT": modes.right is not None}
