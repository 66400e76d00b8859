"""The first result is right, the second is squared."""

EXPECTED = "wrong"
PROBLEM = "../level2_two_results.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        squares = (x * x).sum(-1, keepdim=True)
        return x * torch.rsqrt(squares), squares
