"""Adds a dimension to its argument in place."""

EXPECTED = "wrong"

import torch


def softmax(x):
    y = torch.softmax(x, -1)
    x.unsqueeze_(0)
    return y
