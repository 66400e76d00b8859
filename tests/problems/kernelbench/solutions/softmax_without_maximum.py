"""Softmax without subtracting the maximum: exp overflows for inputs above 88."""

EXPECTED = "right on the problem's own inputs only"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        e = torch.exp(x)
        return e / e.sum(1, keepdim=True)
