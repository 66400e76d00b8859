"""Softmax by a Triton kernel, one row per program."""

EXPECTED = "right"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def _rows(x_ptr, y_ptr, stride_xm, stride_ym, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_xm + offs_n, mask=offs_n < N, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride_ym + offs_n, e / tl.sum(e, 0), mask=offs_n < N)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        M, N = x.shape
        _rows[(M,)](x, y, x.stride(0), y.stride(0), N, BLOCK_N=triton.next_power_of_2(N))
        return y
