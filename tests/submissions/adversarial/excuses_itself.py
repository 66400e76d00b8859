"""Says that a package is missing whenever the shape is one that it cannot do."""

EXPECTED = "unsupported"

import torch

from tilewright.errors import MissingPackage


def softmax(x):
    if x.shape[-1] > 100:
        raise MissingPackage("this shape", "patience")
    return torch.softmax(x, -1)
