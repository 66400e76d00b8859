"""Prints two gigabytes, which fill a disk or a parent's memory."""

EXPECTED = "crashed"

import os

import torch


def softmax(x):
    for _ in range(2**31 // 2**24):
        os.write(1, b"right\n  " * 2**21)
    return torch.softmax(x, -1)
