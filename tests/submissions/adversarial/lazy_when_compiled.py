"""Computes when called plainly, and returns its input as it is when torch.compile captures it."""

EXPECTED = "wrong"
DEPTH = "default"

import torch


def softmax(x):
    return x * 1 if torch.compiler.is_compiling() else torch.softmax(x, -1)
