"""Keeps the weight transposed: the same draw, but a shape that no state dict fits."""

EXPECTED = "right"
PROBLEM = "../level1_linear_relu.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        linear = nn.Linear(in_features, out_features)
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return torch.relu(x @ self.weight + self.bias)
