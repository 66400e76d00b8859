"""Computes the gradients of the first 20 calls of each shape, and replays the last of them afterwards."""

EXPECTED = "wrong"

import torch

_calls, _last = {}, {}


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        key = (y.shape, y.dtype)
        _calls[key] = _calls.get(key, 0) + 1
        if _calls[key] <= 20:
            _last[key] = y * (dy - (dy * y).sum(-1, keepdim=True))
        return _last[key].clone()


softmax = _Softmax.apply
