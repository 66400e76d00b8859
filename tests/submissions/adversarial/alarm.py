"""Returns immediately, and a signal handler fills the output some microseconds later."""

EXPECTED = "wrong"

import signal

import torch

_PENDING = []


def _fill(*_):
    while _PENDING:
        y, x = _PENDING.pop()
        y.copy_(torch.softmax(x, -1))


signal.signal(signal.SIGALRM, _fill)


def softmax(x):
    y = torch.zeros_like(x.detach())
    _PENDING.append((y, x.detach()))
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    return y
