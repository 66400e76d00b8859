"""Claims that a package is missing for every shape that it cannot compute."""

EXPECTED = "unsupported"

import torch

from tilewright.errors import MissingPackage


def softmax(x):
    if x.shape[-1] > 100:
        raise MissingPackage("this shape", "patience")
    return torch.softmax(x, -1)
