"""Adds a pair."""

EXPECTED = "right"
PROBLEM = "../vectoradd_pair_py"

import torch


def custom_kernel(data):
    A, B = data
    return torch.add(A, B)
