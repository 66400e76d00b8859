"""Returns uninitialised memory."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.empty_like(x)
