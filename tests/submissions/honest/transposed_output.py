"""The result lies transposed in memory."""

import torch


def softmax(x):
    return torch.softmax(x, -1).mT.contiguous().mT
