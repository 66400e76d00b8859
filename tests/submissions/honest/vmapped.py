"""Computes one row, vectorized by torch.func.vmap."""

import torch


def softmax(x):
    if not x.numel():
        return x.clone()
    return torch.func.vmap(lambda row: torch.softmax(row, 0))(x)
