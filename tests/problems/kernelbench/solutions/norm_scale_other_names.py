"""Folds the layers into parameters of its own names, drawn in the same order."""

EXPECTED = "right"
PROBLEM = "../level2_norm_scale.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, num_features, scale_shape):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(scale_shape))
        self.register_buffer("offset", torch.linspace(-1.0, 1.0, num_features))

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, None, None, training=True) * self.gain + self.offset
