"""Splits rows into chunks of 97 columns, each with its own maximum."""

import torch


def softmax(x):
    if not x.numel():
        return x.clone()
    chunks = [(chunk, chunk.amax(-1, keepdim=True)) for chunk in x.float().split(97, -1)]
    largest = torch.stack([m for _, m in chunks]).amax(0).detach()
    e = [torch.exp(chunk - largest) for chunk, _ in chunks]
    total = torch.stack([part.sum(-1, keepdim=True) for part in e]).sum(0)
    return (torch.cat(e, -1) / total).to(x.dtype)
