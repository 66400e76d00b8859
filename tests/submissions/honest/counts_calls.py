"""Alternates between two algorithms, both right."""

import itertools

import torch

_calls = itertools.count()


def softmax(x):
    return torch.softmax(x, -1) if next(_calls) % 2 else torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)
