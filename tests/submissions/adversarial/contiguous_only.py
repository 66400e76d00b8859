"""Reads its input as if it were contiguous, ignoring the strides."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x.detach().as_strided(x.shape, (x.shape[1], 1)), -1)
