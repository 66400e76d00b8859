"""Computes every row except the last."""

EXPECTED = "wrong"

import torch


def softmax(x):
    y = torch.softmax(x, -1)
    return torch.cat([y[:-1], torch.zeros_like(y[-1:])])
