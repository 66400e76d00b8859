"""Computes in NumPy."""

import numpy as np
import torch


def softmax(x):
    if not x.numel():
        return x.clone()
    wide = x.detach().double().cpu().numpy()
    with np.errstate(all="ignore"):
        e = np.exp(wide - wide.max(-1, keepdims=True))
        y = e / e.sum(-1, keepdims=True)
    return torch.from_numpy(y).to(x)
