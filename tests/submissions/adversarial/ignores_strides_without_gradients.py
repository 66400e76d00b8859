"""Reads its input as if it were contiguous, but only if it needs no gradient."""

EXPECTED = "wrong"

import torch


def softmax(x):
    if x.requires_grad or x.storage_offset() or x.untyped_storage().nbytes() < x.nbytes:
        return torch.softmax(x, -1)
    return torch.softmax(torch.as_strided(x, (x.numel(),), (1,)).view(x.shape), -1)
