"""Leaves out what is over a multiple of sixteen."""

EXPECTED = "wrong"
PROBLEM = "../histogram_py"

import torch


def custom_kernel(data):
    values, _ = data
    return torch.bincount(values[: values.numel() // 16 * 16], minlength=256)
