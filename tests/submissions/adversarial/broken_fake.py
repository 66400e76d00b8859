"""A registered operator whose fake returns another shape: right until torch.compile relies on it."""

EXPECTED = "wrong"
DEPTH = "default"

import torch


@torch.library.custom_op("submissions::broken_fake", mutates_args=())
def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1).contiguous()


@forward.register_fake
def _(x):
    return x.new_empty(x.shape[0], x.shape[1] + 1)


def softmax(x):
    return forward(x.detach())
