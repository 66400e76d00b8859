"""One row at a time, and torch.func.vmap makes it all of them."""

import torch


def softmax(x):
    if not x.numel():
        return x.clone()
    return torch.func.vmap(lambda row: torch.softmax(row, 0))(x)
