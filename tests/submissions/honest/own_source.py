"""Reads its own source file, which holds the dimension: -1."""

from pathlib import Path

import torch

_DIM = int(Path(__file__).read_text().splitlines()[0].split()[-1].strip('."'))


def softmax(x):
    return torch.softmax(x, _DIM)
