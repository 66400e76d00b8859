"""Returns the right values in float64."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x.double(), -1)
