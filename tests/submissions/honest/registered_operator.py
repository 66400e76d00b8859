"""A registered operator with a fake and a gradient."""

DEPTH = "default"

import torch


@torch.library.custom_op("submissions::softmax", mutates_args=())
def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1).contiguous()


@forward.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


forward.register_autograd(_backward, setup_context=_save)


def softmax(x):
    return forward(x)
