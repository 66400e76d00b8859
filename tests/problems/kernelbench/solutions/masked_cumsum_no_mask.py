"""Ignores the mask."""

EXPECTED = "wrong"
PROBLEM = "../level1_masked_cumsum.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, mask):
        return torch.cumsum(x, self.dim) / 2
