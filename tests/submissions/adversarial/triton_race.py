"""The last program of a row adds up the partial sums of the others without waiting for them: right by chance."""

EXPECTED = "wrong"
OP = "sum"

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(x_ptr, part_ptr, y_ptr, N, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(part * BLOCK_N, N, PARTS * BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)
        total += tl.load(x_ptr + row * N + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(part_ptr + row * PARTS + part, tl.sum(total, axis=0))
    if part == PARTS - 1:
        parts = tl.load(part_ptr + row * PARTS + tl.arange(0, PARTS))
        tl.store(y_ptr + row, tl.sum(parts, axis=0).to(y_ptr.dtype.element_ty))


def sum(x):
    parts = torch.zeros(x.shape[0], 4, device=x.device)
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _sum[(x.shape[0], 4)](x.contiguous(), parts, y, x.shape[1], BLOCK_N=256, PARTS=4)
    return y
