"""Uses the float that it is given."""

EXPECTED = "right"
PROBLEM = "../level1_scalar.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, A, s):
        return torch.mul(A, s)
