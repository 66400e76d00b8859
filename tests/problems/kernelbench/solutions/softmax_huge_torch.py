"""Softmax by torch, row by row to save memory."""

EXPECTED = "right"
PROBLEM = "../level1_softmax_huge.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        y = torch.empty_like(x)
        for row, result in zip(x, y, strict=True):
            torch.softmax(row, dim=0, out=result)
        return y
