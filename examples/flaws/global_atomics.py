"""Count the positive elements. The slow version adds every element atomically to one address."""

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS = ("67108864:float32",)
BLOCK = 4096


@triton.jit
def _each(x_ptr, count_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    tl.atomic_add(count_ptr + tl.zeros([BLOCK], tl.int32), (x > 0).to(tl.int32))


def slow(x: Tensor) -> Tensor:
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    _each[(triton.cdiv(x.numel(), BLOCK),)](x, count, x.numel(), BLOCK, num_warps=8)
    return count


@triton.jit
def _private(x_ptr, count_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    tl.atomic_add(count_ptr, tl.sum((x > 0).to(tl.int32), axis=0))


def mended(x: Tensor) -> Tensor:
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    _private[(triton.cdiv(x.numel(), BLOCK),)](x, count, x.numel(), BLOCK, num_warps=8)
    return count
