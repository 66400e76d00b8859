"""Adds noise of the size of a rounding error, different in each call."""

EXPECTED = "right"
LABELS = ["not deterministic"]

import torch


def softmax(x):
    y = torch.softmax(x.double(), -1)
    return (y * (1 + 1e-7 * torch.rand_like(y))).to(x.dtype)
