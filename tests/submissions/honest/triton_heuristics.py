"""A Triton kernel whose block size comes from a heuristic, with several rows per program."""

OP = "sum"

import torch
import triton
import triton.language as tl


@triton.heuristics({"BLOCK_N": lambda given: triton.next_power_of_2(given["N"])})
@triton.jit
def _sum(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, tl.sum(x, axis=1).to(y_ptr.dtype.element_ty), mask=rows < M)


def sum(x):
    M, N = x.shape
    if not x.numel() or N > 8192:
        return x.sum(-1)
    y = torch.empty(M, dtype=x.dtype, device=x.device)
    _sum[(triton.cdiv(M, 2),)](x.contiguous(), y, M, N, BLOCK_M=2)
    return y
