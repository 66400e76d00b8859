"""Fills its output from a profile function, when Python next calls a function."""

EXPECTED = "tampered"

import sys

import torch

_PENDING = []


def _fill(frame, event, argument):
    if event == "call" and _PENDING:
        y, x = _PENDING.pop()
        y.copy_(torch.softmax(x, -1))


def softmax(x):
    y = torch.zeros_like(x.detach())
    _PENDING.append((y, x.detach()))
    sys.setprofile(_fill)
    return y
