"""Reads its input as if the rows lay one after the other in memory, whatever the strides say."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x.detach().as_strided(x.shape, (x.shape[1], 1)), -1)
