"""Returns NaN, which no comparison by `>` finds too far from anything."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.full_like(x, float("nan"))
