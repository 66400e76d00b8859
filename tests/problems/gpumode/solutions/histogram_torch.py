"""Counts by scattering ones."""

EXPECTED = "right"
PROBLEM = "../histogram_py"

import torch


def custom_kernel(data):
    values, output = data
    output.zero_()
    output.scatter_add_(0, values.long(), torch.ones_like(values, dtype=torch.int64))
    return output
