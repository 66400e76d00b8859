"""Zeroes the input and every copy of it that it finds in the callers' stack frames."""

EXPECTED = "wrong"

import sys

import torch


def _same(value, x):
    return type(value) is torch.Tensor and torch.equal(value.detach().nan_to_num(), x.detach().nan_to_num())


def softmax(x):
    y, kept = torch.softmax(x, -1), x.detach().clone()
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in list(frame.f_locals.values()):
            for inner in value if isinstance(value, list | tuple) else [value]:
                if _same(inner, kept):
                    inner.detach().zero_()
    x.detach().zero_()
    return y
