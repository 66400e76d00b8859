"""A problem that raises when it is loaded."""

EXPECTED = "unusable"
PROBLEM = "../broken_import.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
