"""Both results, in a tuple."""

EXPECTED = "right"
PROBLEM = "../level2_two_results.py"

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        norms = (x * x).sum(-1, keepdim=True).sqrt()
        return x / norms, norms
