"""Zeroes its input, so that a reference that runs later on the same tensor is as wrong as itself."""

EXPECTED = "wrong"

import torch


def softmax(x):
    y = torch.softmax(x, -1)
    x.detach().zero_()
    return y
