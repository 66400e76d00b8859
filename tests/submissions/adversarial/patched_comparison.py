"""Patches Tilewright's comparison in its own process, where nothing is compared."""

EXPECTED = "wrong"

import torch

from tilewright.workbench import check
from tilewright.workbench.check import budget

check.compare = budget.compare = lambda *_: budget.Match(0.0, 0.0)


def softmax(x):
    return torch.zeros_like(x)
