"""Computes in NumPy, which refuses tensors that require a gradient."""

EXPECTED = "right"
LABELS = ["forward only", "fails if its inputs require a gradient"]

import numpy as np
import torch


def softmax(x):
    values = x.double().cpu().numpy()
    with np.errstate(all="ignore"):
        e = np.exp(values - values.max(-1, keepdims=True, initial=-np.inf))
        return torch.from_numpy(e / e.sum(-1, keepdims=True)).to(x)
