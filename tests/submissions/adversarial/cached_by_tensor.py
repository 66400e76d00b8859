"""Keeps its result on the tensor, and returns it although the tensor was written in place."""

EXPECTED = "wrong"

import torch


def softmax(x):
    if x.requires_grad:
        return torch.softmax(x, -1)
    if not hasattr(x, "_softmax"):
        x._softmax = torch.softmax(x, -1)
    return x._softmax.clone()
