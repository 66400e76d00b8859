"""Returns one row, which broadcasts against the others in a careless comparison."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x, -1)[:1]
