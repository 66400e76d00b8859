"""Loads 0 past the end of a row that is no multiple of the block, so that the maximum is at least 0."""

EXPECTED = "wrong"

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + offs, mask=offs < N, other=0.0).to(tl.float32)
    e = tl.where(offs < N, tl.exp(x - tl.max(x)), 0.0)
    y = e / tl.sum(e)
    tl.store(y_ptr + row + offs, y.to(y_ptr.dtype.element_ty), mask=offs < N)


def softmax(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _softmax[(x.shape[0],)](x, y, x.shape[-1], BLOCK=triton.next_power_of_2(x.shape[-1]))
    return y
