"""Forks up to 200 processes, each of which sleeps for a few seconds."""

EXPECTED = "crashed"

import os
import time

import torch

_left = 200


def softmax(x):
    global _left
    while _left:
        _left -= 1
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
    return torch.softmax(x, -1)
