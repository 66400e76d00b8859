"""Writes into the buffer, but returns nothing."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_py"

import torch


def custom_kernel(data):
    A, B, output = data
    torch.add(A, B, out=output)
