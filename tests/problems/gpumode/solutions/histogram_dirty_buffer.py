"""Adds its counts to the initial content of the buffer."""

EXPECTED = "wrong"
PROBLEM = "../histogram_py"

import torch


def custom_kernel(data):
    values, output = data
    return output.scatter_add_(0, values.long(), torch.ones_like(values, dtype=torch.int64))
