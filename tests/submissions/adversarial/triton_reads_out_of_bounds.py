"""A Triton kernel that loads full blocks and discards what lies beyond its row: out of bounds in the last row."""

EXPECTED = "wrong"

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK_N)
    x = tl.where(offs < N, tl.load(x_ptr + row * N + offs).to(tl.float32), -float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + offs, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty), mask=offs < N)


def softmax(x):
    y = torch.empty_like(x)
    if x.numel():
        _softmax[(x.shape[0],)](x.contiguous(), y, x.shape[1], BLOCK_N=triton.next_power_of_2(x.shape[1]))
    return y
