"""Only the first half of the columns; the others stay zero."""

EXPECTED = "wrong"
PROBLEM = "../level1_softmax_wide.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        y = torch.softmax(x, dim=1)
        y[:, x.shape[1] // 2 :] = 0
        return y
