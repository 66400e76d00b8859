"""Names its class Model instead of ModelNew."""

EXPECTED = "unusable"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=1)
