"""The same modules and names, with the batch statistics written out."""

EXPECTED = "right"
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
        var, mean = torch.var_mean(x, dim=0, correction=0)
        y = (x - mean) * torch.rsqrt(var + self.bn.eps) * self.bn.weight + self.bn.bias
        return y * self.scale + self.shift
