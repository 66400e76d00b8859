"""Hangs an object on its result that ends the process when the result is thrown away."""

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
