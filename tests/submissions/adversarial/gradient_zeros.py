"""Right values with a gradient of zeros."""

EXPECTED = "wrong"

import torch


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.softmax(x, -1)

    @staticmethod
    def backward(ctx, dy):
        return torch.zeros_like(dy)


def softmax(x):
    return Softmax.apply(x)
