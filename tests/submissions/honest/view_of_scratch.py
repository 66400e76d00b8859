"""Returns a view into the middle of a larger tensor that is allocated in every call."""

import torch


def softmax(x):
    scratch = x.new_full((x.shape[0] + 2, x.shape[1] + 8), 7.0)
    scratch[1:-1, 3:-5] = torch.softmax(x, -1)
    return scratch[1:-1, 3:-5]
