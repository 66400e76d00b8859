"""Attaches an object to its output that exits the process when the output is freed."""

EXPECTED = "crashed"

import os

import torch


class Bomb:
    def __del__(self):
        os._exit(0)


def softmax(x):
    y = torch.softmax(x, -1)
    y.bomb = Bomb()
    return y
