"""Right values with None for the gradient of one of the two inputs."""

EXPECTED = "wrong"
OP = "add"

import torch


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def add(x, y):
    return Add.apply(x, y)
