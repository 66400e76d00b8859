"""Patches the function of Tilewright that checks the memory of its inputs, and zeroes its input."""

EXPECTED = "tampered"

import torch

from tilewright.worker import memory

memory.GuardedTensor.difference = lambda *_: None
memory.AllocationGuards = None


def softmax(x):
    y = torch.softmax(x, -1)
    x.detach().zero_()
    return y
