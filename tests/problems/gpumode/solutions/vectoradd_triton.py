"""A Triton kernel that writes into the output buffer."""

EXPECTED = "right"
PROBLEM = "../vectoradd_py"

import triton
import triton.language as tl
from task import input_t, output_t


@triton.jit
def _add(a_ptr, b_ptr, c_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n, mask=offs_n < N)
    b = tl.load(b_ptr + offs_n, mask=offs_n < N)
    tl.store(c_ptr + offs_n, a + b, mask=offs_n < N)


def custom_kernel(data: input_t) -> output_t:
    A, B, output = data
    N = A.numel()
    _add[(triton.cdiv(N, 1024),)](A, B, output, N, BLOCK_N=1024)
    return output
