"""Sums recursively by halves, down to a thousand columns."""

import torch


def _total(e):
    half = e.shape[-1] // 2
    return e.sum(-1, keepdim=True) if half < 500 else _total(e[..., :half]) + _total(e[..., half:])


def softmax(x):
    if not x.numel():
        return x.clone()
    e = torch.exp(x.float() - x.float().amax(-1, keepdim=True).detach())
    return (e / _total(e)).to(x.dtype)
