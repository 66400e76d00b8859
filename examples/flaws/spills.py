"""Normalise rows held in registers. The slow version uses one warp per row, 512 elements per thread, and spills."""

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS = ("16384x16384:bfloat16",)


@triton.jit
def _unit_rows(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0))
    tl.store(y_ptr + offs, (x * scale).to(y_ptr.dtype.element_ty))


def _launch(x: Tensor, warps: int) -> Tensor:
    y = torch.empty_like(x)
    _unit_rows[(x.shape[0],)](x, y, x.shape[1], x.shape[1], num_warps=warps)
    return y


def slow(x: Tensor) -> Tensor:
    return _launch(x, 1)


def mended(x: Tensor) -> Tensor:
    return _launch(x, 16)
