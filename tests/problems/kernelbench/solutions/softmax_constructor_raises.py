"""Raises in its constructor, which requires an argument that the problem does not pass."""

EXPECTED = "unusable"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return torch.softmax(x, dim=self.dim)
