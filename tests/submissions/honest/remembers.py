"""Caches outputs by the full content of the input and returns copies: useless for fresh inputs, and right."""

import torch

_KNOWN = {}


def softmax(x):
    content = x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    key = (x.shape, x.dtype, content)
    if key not in _KNOWN:
        _KNOWN[key] = torch.softmax(x.detach(), -1)
    return _KNOWN[key].clone()
