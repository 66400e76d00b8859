"""Caches outputs by a hash of the input and returns the same memory again, so that a caller who writes to one output
changes the next."""

EXPECTED = "wrong"

import hashlib

import torch

_KNOWN = {}


def softmax(x):
    content = x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    key = (x.shape, x.dtype, hashlib.sha256(content).digest())
    if key not in _KNOWN:
        _KNOWN[key] = torch.softmax(x.detach(), -1)
    return _KNOWN[key]
