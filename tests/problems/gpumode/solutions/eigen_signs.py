"""Eigenvectors of the opposite sign: the task's own check accepts them, but no element equals the reference."""

EXPECTED = "wrong"
PROBLEM = "../eigen_py"

import torch


def custom_kernel(data):
    values, vectors = torch.linalg.eigh(data)
    return -vectors, values
