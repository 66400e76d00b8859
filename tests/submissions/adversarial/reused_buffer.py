"""Returns a view of one large buffer, which the next call overwrites."""

EXPECTED = "wrong"

import torch

_BUFFERS = {}


def softmax(x):
    buffer = _BUFFERS.setdefault((x.dtype, x.device), torch.zeros(2**20, dtype=x.dtype, device=x.device))
    y = buffer[: x.numel()].view(x.shape)
    return y.copy_(torch.softmax(x.detach(), -1))
