"""Softmax in bfloat16, which the task's tolerance lets pass."""

EXPECTED = "wrong"
PROBLEM = "../softmax_py"

import torch


def custom_kernel(data):
    return torch.softmax(data.bfloat16(), dim=-1).to(data.dtype)
