"""GELU by the complementary error function, which keeps its precision in the left tail."""

OP = "gelu"

import math

import torch


def gelu(x, approximate):
    wide = x.double()
    if approximate == "tanh":
        return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)
    return (0.5 * wide * torch.special.erfc(-wide / math.sqrt(2))).to(x.dtype)
