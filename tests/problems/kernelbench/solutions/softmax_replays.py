"""Computes in the first 20 calls, and replays the last of these outputs afterwards."""

EXPECTED = "wrong"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        if self.calls <= 20:
            self.last = torch.softmax(x, dim=1)
        return self.last.clone()
