"""Replaces masked values by zeros before the sum."""

EXPECTED = "right"
PROBLEM = "../level1_masked_cumsum.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, mask):
        return torch.where(mask, x, torch.zeros_like(x)).cumsum(self.dim)
