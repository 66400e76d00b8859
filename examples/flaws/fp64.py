"""GELU of a scaled vector. The scale is float64, as NumPy returns it; the slow version promotes everything to it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS = ("67108864:float32", "1:float64")
BLOCK = 1024


@triton.jit
def _gelu(x_ptr, scale_ptr, y_ptr, N, NARROWS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    if NARROWS:
        scale = scale.to(tl.float32)
    x = tl.load(x_ptr + offs, mask=offs < N) * scale
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < N)


def _launch(x: Tensor, scale: Tensor, narrows: bool) -> Tensor:
    y = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), BLOCK),)](x, scale, y, x.numel(), narrows, BLOCK)
    return y


def slow(x: Tensor, scale: Tensor) -> Tensor:
    return _launch(x, scale, False)


def mended(x: Tensor, scale: Tensor) -> Tensor:
    return _launch(x, scale, True)
