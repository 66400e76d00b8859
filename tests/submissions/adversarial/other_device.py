"""Returns a tensor of the right shape and dtype on the meta device."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.empty_like(x, device="meta")
