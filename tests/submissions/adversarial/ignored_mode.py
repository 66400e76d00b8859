"""Computes the exact GELU whichever form is asked for; the two differ in the fourth digit."""

EXPECTED = "wrong"
OP = "gelu"

import torch


def gelu(x, approximate):
    return torch.nn.functional.gelu(x)
