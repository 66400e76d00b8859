"""Sums the columns in a random order, from its own generator with a fixed seed."""

import torch


def softmax(x):
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(5)).to(x.device)
    return torch.softmax(x[:, order], -1)[:, order.argsort()]
