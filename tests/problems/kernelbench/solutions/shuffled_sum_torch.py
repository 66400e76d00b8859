"""The sum by torch."""

EXPECTED = "right"
PROBLEM = "../level1_shuffled_sum.py"

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x.sum(1)
