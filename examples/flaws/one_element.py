"""Sum of two vectors. The slow version has one element per thread, so blocks start and end with little work."""

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS = ("67108864:bfloat16", "67108864:bfloat16")
THREADS = 128


@triton.jit
def _add(x_ptr, y_ptr, z_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)
    y = tl.load(y_ptr + offs, mask=offs < N)
    tl.store(z_ptr + offs, x + y, mask=offs < N)


def _launch(x: Tensor, y: Tensor, block: int) -> Tensor:
    z = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), block),)](x, y, z, x.numel(), block, num_warps=THREADS // 32)
    return z


def slow(x: Tensor, y: Tensor) -> Tensor:
    return _launch(x, y, THREADS)


def mended(x: Tensor, y: Tensor) -> Tensor:
    return _launch(x, y, 8 * THREADS)
