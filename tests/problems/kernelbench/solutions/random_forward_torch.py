"""As random as the problem, which no check can judge."""

EXPECTED = "unusable"
PROBLEM = "../level3_random_forward.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc = nn.Linear(size, size)

    def forward(self, x):
        return self.fc(x + torch.randn_like(x))
