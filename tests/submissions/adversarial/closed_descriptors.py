"""Closes every file descriptor it has inherited, including the one for its replies."""

EXPECTED = "crashed"

import os

import torch


def softmax(x):
    os.closerange(3, 1024)
    return torch.softmax(x, -1)
