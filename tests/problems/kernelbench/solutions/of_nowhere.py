"""A problem that is not there."""

EXPECTED = "unusable"
PROBLEM = "../nowhere.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
