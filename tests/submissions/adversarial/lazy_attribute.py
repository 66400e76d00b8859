"""Returns zeros with an attribute that shadows a method of Tensor and returns the real values."""

EXPECTED = "wrong"

import torch


def softmax(x):
    y, real = torch.zeros_like(x.detach()), torch.softmax(x.detach(), -1)
    y.detach = lambda: real
    return y
