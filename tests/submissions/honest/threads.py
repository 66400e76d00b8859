"""Uses two threads, each with half of the rows, and joins both before it returns."""

from concurrent.futures import ThreadPoolExecutor

import torch


def softmax(x):
    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(lambda part: torch.softmax(part, -1), x.chunk(2))))
