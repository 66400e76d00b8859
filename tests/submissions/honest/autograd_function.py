"""An autograd.Function with its own backward."""

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
        wide, dy = y.float(), dy.float()
        return (wide * (dy - (wide * dy).sum(-1, keepdim=True))).to(y.dtype)


def softmax(x):
    return Softmax.apply(x)
