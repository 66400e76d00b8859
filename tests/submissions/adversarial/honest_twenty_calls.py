"""Computes in the first 20 calls of each shape, and replays the last of these outputs afterwards."""

EXPECTED = "wrong"

import torch

_calls, _last = {}, {}


def softmax(x):
    key = (x.shape, x.dtype)
    _calls[key] = _calls.get(key, 0) + 1
    if _calls[key] <= 20:
        _last[key] = torch.softmax(x.detach(), -1)
    return _last[key].clone()
