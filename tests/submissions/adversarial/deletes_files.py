"""Deletes `canary.txt` in its own folder."""

EXPECTED = "crashed"

from pathlib import Path

import torch


def softmax(x):
    canary = Path(__file__).with_name("canary.txt")
    if canary.exists():
        canary.unlink()
    return torch.softmax(x, -1)
