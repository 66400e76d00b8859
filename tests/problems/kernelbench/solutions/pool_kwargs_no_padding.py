"""Leaves the padding out of the mean."""

EXPECTED = "wrong"
PROBLEM = "../level1_pool_kwargs.py"

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, kernel_size, stride=1, padding=0):
        super().__init__()
        self.pool = nn.AvgPool1d(kernel_size, stride=stride, padding=padding, count_include_pad=False)

    def forward(self, x):
        return self.pool(x)
