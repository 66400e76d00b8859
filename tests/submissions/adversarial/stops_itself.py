"""Stops its own process, which neither ends nor answers."""

EXPECTED = "timeout"

import os
import signal

import torch


def softmax(x):
    os.kill(os.getpid(), signal.SIGSTOP)
    return torch.softmax(x, -1)
