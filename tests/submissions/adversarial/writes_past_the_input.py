"""Computes honestly and overwrites the four bytes after its input."""

EXPECTED = "wrong"

import ctypes

import torch


def softmax(x):
    if x.numel() and x.is_contiguous() and x.device.type == "cpu":
        ctypes.memset(x.data_ptr() + x.nbytes, 0x55, 4)
    return torch.softmax(x, -1)
