"""Writes the result over its input and returns that."""

EXPECTED = "wrong"

import torch


def softmax(x):
    x.detach().copy_(torch.softmax(x.detach(), -1))
    return x
