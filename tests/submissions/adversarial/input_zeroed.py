"""Zeroes its input, so that a reference that runs later on the same tensor is equally wrong."""

EXPECTED = "wrong"

import torch


def softmax(x):
    y = torch.softmax(x, -1)
    x.detach().zero_()
    return y
