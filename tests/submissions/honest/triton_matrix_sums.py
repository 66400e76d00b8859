"""Sums rows on tensor cores, as a product with ones."""

OP = "sum"

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ones = tl.full([BLOCK_N, 16], 1.0, x_ptr.dtype.element_ty)
    acc = tl.zeros([BLOCK_M, 16], tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, ones, acc, input_precision="ieee")
    tl.store(y_ptr + rows, tl.max(acc, axis=1).to(y_ptr.dtype.element_ty), mask=rows < M)


def sum(x):
    M, N = x.shape
    y = torch.empty(M, dtype=x.dtype, device=x.device)
    if M:
        _sum[(triton.cdiv(M, 16),)](x.contiguous(), y, M, N, BLOCK_M=16, BLOCK_N=64)
    return y
