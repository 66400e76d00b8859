"""Replaces the function of Tilewright that looks at the memory around its inputs by one that finds it as it was."""

EXPECTED = "tampered"

import torch

from tilewright.worker import memory

memory.GuardedTensor.difference = lambda *_: None
memory.AllocationGuards = None


def softmax(x):
    y = torch.softmax(x, -1)
    x.detach().zero_()
    return y
