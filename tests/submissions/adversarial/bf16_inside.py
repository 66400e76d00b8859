"""Computes the float32 task in bfloat16."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x.bfloat16(), -1).to(x.dtype)
