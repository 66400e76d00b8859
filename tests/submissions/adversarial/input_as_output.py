"""Overwrites its input with the output and returns it."""

EXPECTED = "wrong"

import torch


def softmax(x):
    x.detach().copy_(torch.softmax(x.detach(), -1))
    return x
