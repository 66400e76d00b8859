"""Reads from its input's address rounded down to a multiple of four elements."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x.detach().as_strided(x.shape, x.stride(), x.storage_offset() // 4 * 4), -1)
