"""Overwrites its results a moment after the call, when they have been read."""

EXPECTED = "wrong"

import threading

import torch


def softmax(x):
    y = torch.softmax(x.detach(), -1)
    timer = threading.Timer(0.05, y.fill_, (0.5,))
    timer.daemon = True
    timer.start()
    return y
