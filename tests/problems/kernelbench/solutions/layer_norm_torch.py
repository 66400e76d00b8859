"""Layer norm written out."""

EXPECTED = "right"
PROBLEM = "../level1_layer_norm_shape.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps, affine):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape, eps=eps, elementwise_affine=affine)

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=(1, 2), correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.ln.eps) * self.ln.weight + self.ln.bias
