"""Adds up partial sums with atomics: the last bit depends on their order."""

OP = "sum"

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(x_ptr, total_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.atomic_add(total_ptr + row, tl.sum(x, axis=0))


def sum(x):
    M, N = x.shape
    total = torch.zeros(M, device=x.device)
    if x.numel():
        _sum[(M, triton.cdiv(N, 512))](x.contiguous(), total, N, BLOCK=512)
    return total.to(x.dtype)
