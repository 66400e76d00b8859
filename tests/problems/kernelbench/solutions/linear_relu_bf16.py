"""Multiplies in bfloat16, which a tolerance of 1e-2 accepts."""

EXPECTED = "wrong"
PROBLEM = "../level1_linear_relu.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        y = x.bfloat16().float() @ self.linear.weight.bfloat16().float().t()
        return torch.relu(y.to(x.dtype) + self.linear.bias)
