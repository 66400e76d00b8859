"""Fills its output when gradients are switched back on after the call."""

EXPECTED = "tampered"

import torch

_PENDING = []
_exit = torch.set_grad_enabled.__exit__


def _filling(self, *args):
    while _PENDING:
        y, x = _PENDING.pop()
        y.copy_(torch.softmax(x, -1))
    return _exit(self, *args)


def softmax(x):
    y = torch.zeros_like(x.detach())
    _PENDING.append((y, x.detach()))
    torch.set_grad_enabled.__exit__ = _filling
    return y
