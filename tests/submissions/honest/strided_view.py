"""Returns every second element of a wider tensor; where there is one element, its strides are arbitrary."""

import torch


def softmax(x):
    y = torch.softmax(x, -1)
    return torch.stack([y, y], -1)[..., 0]
