"""Returns an output with transposed strides."""

import torch


def softmax(x):
    return torch.softmax(x, -1).mT.contiguous().mT
