"""Replaces the function of Tilewright that runs it by one that does not look whether the input has changed."""

EXPECTED = "tampered"

import torch

from tilewright import worker

worker.run_kernel = worker.run_with_gradients


def softmax(x):
    y = torch.softmax(x, -1)
    x.detach().zero_()
    return y
