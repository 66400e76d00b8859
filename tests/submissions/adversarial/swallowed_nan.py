"""Treats NaN in its input as zero."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(torch.where(x.isnan(), 0.0, x), -1)
