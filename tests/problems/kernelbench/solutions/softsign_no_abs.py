"""Leaves out the absolute value."""

EXPECTED = "right on the problem's own inputs only"
PROBLEM = "../level1_softsign.py"

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x / (1 + x)
