"""The logarithm by log1p."""

EXPECTED = "right"
PROBLEM = "../level1_log_scale.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.log1p(x - 0.5) * 2
