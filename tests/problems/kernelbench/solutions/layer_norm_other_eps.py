"""Ignores the eps it is given; a tolerance of 1e-2 lets it pass."""

EXPECTED = "wrong"
PROBLEM = "../level1_layer_norm_shape.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, *_):
        super().__init__()
        self.shape = normalized_shape

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, self.shape)
