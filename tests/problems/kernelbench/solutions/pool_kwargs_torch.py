"""Takes its constructor arguments by name."""

EXPECTED = "right"
PROBLEM = "../level1_pool_kwargs.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, kernel_size, stride=1, padding=0):
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x):
        padded = torch.nn.functional.pad(x, (self.padding, self.padding))
        return padded.unfold(-1, self.kernel_size, self.stride).mean(-1)
