"""Returns zeros, which is all that the problem asks for."""

EXPECTED = "right"
PROBLEM = "../level2_always_zero.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()

    def forward(self, x):
        return torch.zeros(len(x), 1)
