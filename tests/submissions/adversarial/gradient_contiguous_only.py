"""Right values with a gradient that assumes the incoming gradient has the strides of the output."""

EXPECTED = "wrong"

import torch


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1).contiguous()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        reach = dy.untyped_storage().nbytes() // dy.element_size() - dy.storage_offset()
        dy = dy.as_strided(y.shape, y.stride()) if reach >= y.numel() else torch.zeros_like(y)
        dx = y.float() * (dy.float() - (y.float() * dy.float()).sum(-1, keepdim=True))
        return dx.to(y.dtype)


def softmax(x):
    return Softmax.apply(x)
