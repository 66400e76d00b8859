"""Allocates with torch.empty and lets torch write there."""

import torch


def softmax(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.softmax(x.detach(), -1, out=y)
    return y
