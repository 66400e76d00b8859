"""Reads its input from the last address before it that is a multiple of four elements."""

EXPECTED = "wrong"

import torch


def softmax(x):
    return torch.softmax(x.detach().as_strided(x.shape, x.stride(), x.storage_offset() // 4 * 4), -1)
