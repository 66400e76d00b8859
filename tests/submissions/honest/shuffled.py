"""Takes the columns in a random order, from a generator of its own with a fixed seed."""

import torch


def softmax(x):
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(5)).to(x.device)
    return torch.softmax(x[:, order], -1)[:, order.argsort()]
