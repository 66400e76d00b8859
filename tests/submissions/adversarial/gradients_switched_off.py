"""Switches gradients off for the rest of the program."""

EXPECTED = "wrong"

import torch


def softmax(x):
    y = torch.softmax(x, -1)
    torch.set_grad_enabled(False)
    return y
