"""Softmax in bfloat16, which an absolute tolerance of 1e-2, and even of 1e-4, accepts."""

EXPECTED = "wrong"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return torch.softmax(x.to(torch.bfloat16), dim=1).to(x.dtype)
