"""Patches time.perf_counter to run a thousand times slower."""

EXPECTED = "tampered"

import time

import torch

_clock = time.perf_counter
time.perf_counter = lambda: _clock() / 1000


def softmax(x):
    return torch.softmax(x, -1)
