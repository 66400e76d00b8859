"""Changes torch's default dtype while it computes and restores it."""

import torch


def softmax(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.softmax(x * torch.ones(()).to(x), -1)
    finally:
        torch.set_default_dtype(before)
