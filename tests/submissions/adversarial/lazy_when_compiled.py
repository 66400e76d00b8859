"""Computes in a plain call, and returns its input unchanged under torch.compile."""

EXPECTED = "wrong"
DEPTH = "default"

import torch


def softmax(x):
    return x * 1 if torch.compiler.is_compiling() else torch.softmax(x, -1)
