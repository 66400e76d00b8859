"""Patches torch.equal to return True, to hide that the input is zeroed."""

EXPECTED = "tampered"

import torch

torch.equal = lambda *_: True


def softmax(x):
    y = torch.softmax(x, -1)
    x.detach().zero_()
    return y
