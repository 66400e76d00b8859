"""Values that do not belong to their vectors."""

EXPECTED = "wrong"
PROBLEM = "../eigen_py"

import torch


def custom_kernel(data):
    values, vectors = torch.linalg.eigh(data)
    return vectors, values.flip(-1)
