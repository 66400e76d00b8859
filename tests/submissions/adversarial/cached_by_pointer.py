"""Computes once for each address and replays that result whatever lies there later."""

EXPECTED = "wrong"

import torch

_KNOWN = {}


def softmax(x):
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in _KNOWN:
        _KNOWN[key] = torch.softmax(x.detach(), -1)
    return _KNOWN[key].clone()
