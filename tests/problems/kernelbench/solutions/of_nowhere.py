"""A problem file that does not exist."""

EXPECTED = "unusable"
PROBLEM = "../nowhere.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
