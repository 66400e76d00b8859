"""Returns a tensor of the right shape and dtype on a device that holds no values."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.empty_like(x, device="meta")
