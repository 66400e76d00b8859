"""A problem that raises on import."""

EXPECTED = "unusable"
PROBLEM = "../broken_import.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
