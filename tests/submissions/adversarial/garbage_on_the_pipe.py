"""Computes honestly and writes noise to every pipe and socket it has inherited, including the one for its replies."""

EXPECTED = "tampered"

import contextlib
import os
import stat

import torch


def softmax(x):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                os.write(descriptor, b"right\n" * 100)
    return torch.softmax(x, -1)
