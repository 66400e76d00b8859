"""Returns twenty buffers in turn, so that a result is overwritten twenty calls later."""

EXPECTED = "wrong"

import torch

_RINGS = {}


def softmax(x):
    ring = _RINGS.setdefault((x.shape, x.dtype, x.device), [torch.empty_like(x) for _ in range(20)])
    ring.append(ring.pop(0))
    return ring[0].detach().copy_(torch.softmax(x.detach(), -1))
