"""Returns memory that nothing was written to."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.empty_like(x)
