"""Clamps the small negative values of GELU to zero."""

EXPECTED = "wrong"
OP = "gelu"

import torch


def gelu(x, approximate):
    return torch.relu(torch.nn.functional.gelu(x, approximate=approximate))
