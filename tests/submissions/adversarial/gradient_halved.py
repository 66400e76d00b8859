"""Right values with half of the gradient."""

EXPECTED = "wrong"

import torch


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return 0.5 * y * (dy - (y * dy).sum(-1, keepdim=True))


def softmax(x):
    return Softmax.apply(x)
