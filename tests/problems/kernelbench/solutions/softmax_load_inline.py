"""Softmax in CUDA C++ by load_inline, the usual form: it needs nvcc and a GPU."""

EXPECTED = "unusable"
PROBLEM = "../level1_softmax.py"

import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <torch/extension.h>

__global__ void rows(const float* x, float* y, int n) {
  x += (long long)blockIdx.x * n;
  y += (long long)blockIdx.x * n;
  float top = -INFINITY, sum = 0.f;
  for (int i = 0; i < n; ++i) top = fmaxf(top, x[i]);
  for (int i = 0; i < n; ++i) sum += expf(x[i] - top);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = expf(x[i] - top) / sum;
}

torch::Tensor softmax_rows(torch::Tensor x) {
  auto y = torch::empty_like(x);
  rows<<<x.size(0), 128>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.size(1));
  return y;
}
"""

module = load_inline(
    name="softmax_rows",
    cpp_sources="torch::Tensor softmax_rows(torch::Tensor x);",
    cuda_sources=CUDA,
    functions=["softmax_rows"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return module.softmax_rows(x.contiguous())
