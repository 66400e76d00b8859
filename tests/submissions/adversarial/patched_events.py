"""Patches torch.cuda.synchronize to do nothing and torch.cuda.Event to measure a microsecond."""

EXPECTED = "tampered"

import torch


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def elapsed_time(self, _):
        return 0.001


torch.cuda.synchronize = lambda *_: None
torch.cuda.Event = Event


def softmax(x):
    return torch.softmax(x, -1)
