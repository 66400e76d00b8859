"""Zeros, which pass since every value is below the task's tolerance."""

EXPECTED = "wrong"
PROBLEM = "../softmax_py"

import torch


def custom_kernel(data):
    return torch.zeros_like(data)
