"""Fills its output when Python next collects garbage, which is soon."""

EXPECTED = "tampered"

import gc

import torch

_PENDING = []


def _fill(phase, info):
    while _PENDING:
        y, x = _PENDING.pop()
        y.copy_(torch.softmax(x, -1))


gc.callbacks.append(_fill)
gc.set_threshold(1, 1, 1)


def softmax(x):
    y = torch.zeros_like(x.detach())
    _PENDING.append((y, x.detach()))
    return y
