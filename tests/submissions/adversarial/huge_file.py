"""Creates a temporary file of 4 GB."""

EXPECTED = "crashed"

import tempfile

import torch


def softmax(x):
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * 2**30)
    return torch.softmax(x, -1)
