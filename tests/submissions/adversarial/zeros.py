"""Returns zeros, which a tolerance of 1e-2 accepts for every long row."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.zeros_like(x)
