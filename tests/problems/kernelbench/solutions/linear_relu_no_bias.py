"""Leaves the bias out."""

EXPECTED = "wrong"
PROBLEM = "../level1_linear_relu.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        return torch.relu(x @ self.linear.weight.t())
