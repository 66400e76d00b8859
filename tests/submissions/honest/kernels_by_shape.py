"""Builds a function per length and dtype and caches the last 32, as one would cache compiled kernels."""

import functools

import torch


@functools.lru_cache(maxsize=32)
def _built(N, dtype):
    if N == 1:
        return lambda x: torch.softmax(x.float(), -1).to(dtype)
    return lambda x: torch.softmax(x, -1, dtype=torch.float32).to(dtype)


def softmax(x):
    return _built(x.shape[-1], x.dtype)(x)
