"""Draws its own parameters, which differ from the problem's."""

EXPECTED = "wrong"
PROBLEM = "../level1_linear_relu.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / in_features**0.5)

    def forward(self, x):
        return torch.relu(x @ self.weight + self.bias)
