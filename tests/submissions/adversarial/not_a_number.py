"""Returns NaN, for which every comparison by `>` is false."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.full_like(x, float("nan"))
