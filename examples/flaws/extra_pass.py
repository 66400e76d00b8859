"""Scale, shift and clamp a vector at zero. The slow version stores the scaled vector in memory in between."""

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS = ("67108864:bfloat16",)
BLOCK = 2048


@triton.jit
def _scale(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, x * 0.5 + 1.0, mask=offs < N)


@triton.jit
def _cut(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, tl.maximum(x, 0.0), mask=offs < N)


def slow(x: Tensor) -> Tensor:
    scaled, y = torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _scale[grid](x, scaled, x.numel(), BLOCK, num_warps=8)
    _cut[grid](scaled, y, x.numel(), BLOCK, num_warps=8)
    return y


@triton.jit
def _scale_and_cut(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, tl.maximum(x * 0.5 + 1.0, 0.0), mask=offs < N)


def mended(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _scale_and_cut[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK, num_warps=8)
    return y
