"""Subtracts 40 instead of the row maximum: NaN or zero for rows far from zero."""

EXPECTED = "wrong"

import torch


def softmax(x):
    e = torch.exp(x.float() - 40)
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)
