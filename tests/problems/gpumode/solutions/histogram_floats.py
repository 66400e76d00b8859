"""The right counts as floats, which the task's own comparison does not notice."""

EXPECTED = "wrong"
PROBLEM = "../histogram_py"

import torch


def custom_kernel(data):
    return torch.bincount(data[0], minlength=256).float()
