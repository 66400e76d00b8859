"""A decoding step that updates the cache as the reference does."""

EXPECTED = "right"
PROBLEM = "../cache_py"

import torch


def custom_kernel(data):
    config, x, cache = data
    keys = cache(x)
    weights = torch.softmax((keys @ x[..., None]).squeeze(-1) / config.dim**0.5, -1)
    return (weights[:, None] @ keys).squeeze(1)
