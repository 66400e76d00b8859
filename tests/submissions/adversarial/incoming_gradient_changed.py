"""Computes its gradient in the memory of the incoming gradient, which other functions may share."""

EXPECTED = "wrong"

import torch


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return dy.sub_((dy * y).sum(-1, keepdim=True)).mul_(y)


softmax = _Softmax.apply
