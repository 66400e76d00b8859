"""Registers a clone of its own with torch, which computes the output when it is copied."""

EXPECTED = "tampered"

import torch

_PENDING = []
_LIBRARY = torch.library.Library("aten", "IMPL")


def _clone(x, memory_format=None):
    copy = torch.empty_like(x).copy_(x)
    while _PENDING:
        _, source = _PENDING.pop()
        copy.copy_(torch.softmax(source, -1))
    return copy


_LIBRARY.impl("clone", _clone, "CPU")


def softmax(x):
    y = torch.zeros_like(x.detach())
    _PENDING.append((y, x.detach()))
    return y
