"""L1 normalization by torch."""

EXPECTED = "right"
PROBLEM = "../level1_l1_norm.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.normalize(x, p=1.0, dim=1, eps=0)
