"""Clears the argument of the previous call, unless it lies in the same memory."""

EXPECTED = "wrong"

import torch

_before = []


def softmax(x):
    y = torch.softmax(x, -1)
    for earlier in _before:
        if earlier.data_ptr() != x.data_ptr():
            earlier.zero_()
    _before[:] = [x.detach()]
    return y
