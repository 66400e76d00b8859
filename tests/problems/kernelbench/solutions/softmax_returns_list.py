"""The right values, in a list."""

EXPECTED = "wrong"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return [torch.softmax(x, dim=1)]
