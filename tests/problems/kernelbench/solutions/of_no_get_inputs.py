"""A problem without get_inputs."""

EXPECTED = "unusable"
PROBLEM = "../no_get_inputs.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
