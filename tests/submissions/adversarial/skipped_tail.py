"""Computes full blocks of 256 columns and leaves the remainder of each row at zero."""

EXPECTED = "wrong"

import torch


def softmax(x):
    whole = x.shape[-1] // 256 * 256
    y = torch.zeros_like(x)
    y[:, :whole] = torch.softmax(x, -1)[:, :whole]
    return y
