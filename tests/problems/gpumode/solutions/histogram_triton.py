"""Counts by atomics into a buffer that it clears first."""

EXPECTED = "right"
PROBLEM = "../histogram_py"

import triton
import triton.language as tl


@triton.jit
def _count(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0).to(tl.int32)
    tl.atomic_add(out_ptr + x, tl.full((BLOCK_N,), 1, tl.int64), mask=offs_n < N)


def custom_kernel(data):
    values, output = data
    output.zero_()
    N = values.numel()
    _count[(triton.cdiv(N, 1024),)](values, output, N, BLOCK_N=1024)
    return output
