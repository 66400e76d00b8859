"""Computes where torch.empty has been replaced by a function that watches memory, and returns zeros elsewhere."""

EXPECTED = "wrong"

import types

import torch


def softmax(x):
    watched = not isinstance(torch.empty, types.BuiltinFunctionType)
    return torch.softmax(x, -1) if watched else torch.zeros_like(x)
