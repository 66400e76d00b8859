"""The parameters have other names, but are drawn in the same order from the same seed."""

EXPECTED = "right"
PROBLEM = "../level1_linear_relu.py"

import math

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.W = nn.Parameter(torch.empty(out_features, in_features))
        self.b = nn.Parameter(torch.empty(out_features))
        nn.init.kaiming_uniform_(self.W, a=math.sqrt(5))
        nn.init.uniform_(self.b, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))

    def forward(self, x):
        return torch.relu(x @ self.W.t() + self.b)
