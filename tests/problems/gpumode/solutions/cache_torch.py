"""A step that leaves the cache it is given as the reference does."""

EXPECTED = "unusable"
PROBLEM = "../cache_py"

import torch


def custom_kernel(data):
    config, x, cache = data
    keys = cache(x)
    weights = torch.softmax((keys @ x[..., None]).squeeze(-1) / config.dim**0.5, -1)
    return (weights[:, None] @ keys).squeeze(1)
