"""A Triton kernel that holds a row in registers; torch takes the rows that are too long for that."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + offs, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty), mask=offs < N)


def softmax(x):
    M, N = x.shape
    if N > 32768:
        return torch.softmax(x, -1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        _softmax[(M,)](x.contiguous(), y, N, BLOCK_N=triton.next_power_of_2(N))
    return y
