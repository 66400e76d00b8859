"""Hard-codes the float, with too few digits."""

EXPECTED = "wrong"
PROBLEM = "../level1_scalar.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, A, s):
        return torch.mul(A, 3.1415)
