"""Computes for tensors on the CPU and returns zeros for those on a GPU."""

EXPECTED = "wrong"
NEEDS = "gpu"

import torch


def softmax(x):
    return torch.zeros_like(x) if x.is_cuda else torch.softmax(x, -1)
