"""Computes on a stream of its own that nobody waits for."""

EXPECTED = "wrong"
NEEDS = "gpu"

import torch


def softmax(x):
    y = torch.zeros_like(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        y.copy_(torch.softmax(x.detach(), -1))
    return y
