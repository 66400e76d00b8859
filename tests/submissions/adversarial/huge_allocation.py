"""Allocates 20 GB of host memory at once."""

EXPECTED = "crashed"

import torch


def softmax(x):
    return torch.softmax(x, -1) + torch.empty(20 * 2**30, dtype=torch.uint8)[0]
