"""Eigenvectors of the other sign: right by the task's own check, unlike the reference in every element."""

EXPECTED = "wrong"
PROBLEM = "../eigen_py"

import torch


def custom_kernel(data):
    values, vectors = torch.linalg.eigh(data)
    return -vectors, values
