"""Computes in the first three calls, which a naive checker compares, and returns zeros afterwards."""

EXPECTED = "wrong"

import torch

_calls = 0


def softmax(x):
    global _calls
    _calls += 1
    return torch.softmax(x, -1) if _calls <= 3 else torch.zeros_like(x)
