"""A Triton kernel that stores full blocks: each row overwrites the start of the next, and the last is out of bounds."""

EXPECTED = "wrong"

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + offs, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty))


def softmax(x):
    y = torch.empty_like(x)
    if x.numel():
        _softmax[(x.shape[0],)](x.contiguous(), y, x.shape[1], BLOCK_N=triton.next_power_of_2(x.shape[1]))
    return y
