"""Accumulates in float16, whatever the dtype of the input."""

EXPECTED = "wrong"
OP = "sum"

import torch


def sum(x):
    total = torch.zeros(x.shape[:-1], dtype=torch.float16, device=x.device)
    for part in x.split(64, -1):
        total = total + part.sum(-1).half()
    return total.to(x.dtype)
