"""Returns zeros, which an absolute tolerance of 1e-4 accepts for this softmax."""

EXPECTED = "wrong"
PROBLEM = "../level1_softmax_wide.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return torch.zeros_like(x)
