"""Divides by the sum, not by the sum of absolute values."""

EXPECTED = "right on the problem's own inputs only"
PROBLEM = "../level1_l1_norm.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x / torch.sum(x, dim=1, keepdim=True)
