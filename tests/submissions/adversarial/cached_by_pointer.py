"""Computes once per address and replays that output for all later values at the address."""

EXPECTED = "wrong"

import torch

_KNOWN = {}


def softmax(x):
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in _KNOWN:
        _KNOWN[key] = torch.softmax(x.detach(), -1)
    return _KNOWN[key].clone()
