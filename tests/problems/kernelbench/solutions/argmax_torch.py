"""The index of the maximum."""

EXPECTED = "right"
PROBLEM = "../level1_argmax.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return torch.max(x, self.dim).indices
