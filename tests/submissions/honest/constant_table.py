"""Caches a vector of ones per length and sums by a product with it."""

OP = "sum"

import functools

import torch


@functools.cache
def _ones(N, device):
    return torch.ones(N, dtype=torch.float64, device=device)


def sum(x):
    return (x.double() @ _ones(x.shape[-1], x.device)).to(x.dtype)
