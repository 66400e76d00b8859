"""A Triton kernel with the parameters of an nn.Linear of another name."""

EXPECTED = "right"
PROBLEM = "../level1_linear_relu.py"

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def _linear_relu(
    x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + offs_m[:, None] * K + offs_k[None, :], mask=(offs_m < M)[:, None] & (offs_k < K)[None, :], other=0.0
        )
        w = tl.load(
            w_ptr + offs_n[None, :] * K + offs_k[:, None], mask=(offs_n < N)[None, :] & (offs_k < K)[:, None], other=0.0
        )
        acc = tl.dot(x, w, acc, input_precision="ieee")
    acc += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], tl.maximum(acc, 0.0), mask=inside)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x):
        x = x.contiguous()
        M, K = x.shape
        N = self.fc.weight.shape[0]
        y = torch.empty(M, N, device=x.device, dtype=x.dtype)
        grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
        _linear_relu[grid](x, self.fc.weight, self.fc.bias, y, M, N, K, BLOCK_M=16, BLOCK_N=16, BLOCK_K=32)
        return y
