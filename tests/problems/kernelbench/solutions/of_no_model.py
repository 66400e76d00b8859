"""A problem without Model."""

EXPECTED = "unusable"
PROBLEM = "../no_model.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
