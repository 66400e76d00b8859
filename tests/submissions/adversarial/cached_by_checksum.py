"""Replays a result for every input of the same shape and sum, such as the same values in another order."""

EXPECTED = "wrong"

import torch

_KNOWN = {}


def softmax(x):
    key = (x.shape, x.dtype, round(float(x.detach().double().sum()), 6))
    if key not in _KNOWN:
        _KNOWN[key] = torch.softmax(x.detach(), -1)
    return _KNOWN[key].clone()
