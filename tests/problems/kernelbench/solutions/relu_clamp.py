"""ReLU as a clamp."""

EXPECTED = "right"
PROBLEM = "../level1_relu.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.clamp(x, min=0)
