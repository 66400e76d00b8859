"""Computes the exact GELU in both modes; they differ in the fourth digit."""

EXPECTED = "wrong"
OP = "gelu"

import torch


def gelu(x, approximate):
    return torch.nn.functional.gelu(x)
