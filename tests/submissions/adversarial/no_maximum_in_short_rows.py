"""Does not subtract the maximum where a row is short."""

EXPECTED = "wrong"
DEPTH = "default"

import torch


def softmax(x):
    if x.shape[-1] > 32:
        return torch.softmax(x, -1)
    e = x.float().exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)
