"""Returns zeros, which the task's own check accepts because every value is below its tolerance."""

EXPECTED = "wrong"
PROBLEM = "../softmax_py"

import torch


def custom_kernel(data):
    return torch.zeros_like(data)
