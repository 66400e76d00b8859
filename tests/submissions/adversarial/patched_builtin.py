"""Fills its output when the next function calls zip."""

EXPECTED = "tampered"

import builtins

import torch

_PENDING = []
_zip = builtins.zip


def _filling(*args, **options):
    while _PENDING:
        y, x = _PENDING.pop()
        y.copy_(torch.softmax(x, -1))
    return _zip(*args, **options)


def softmax(x):
    y = torch.zeros_like(x.detach())
    _PENDING.append((y, x.detach()))
    builtins.zip = _filling
    return y
