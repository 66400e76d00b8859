"""Uses the running statistics, as in evaluation mode."""

EXPECTED = "wrong"
PROBLEM = "../level2_norm_scale.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, num_features, scale_shape):
        super().__init__()
        self.bn = nn.BatchNorm1d(num_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, num_features))

    def forward(self, x):
        bn = self.bn
        y = (x - bn.running_mean) * torch.rsqrt(bn.running_var + bn.eps) * bn.weight + bn.bias
        return y * self.scale + self.shift
