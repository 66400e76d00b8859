"""Expects two tensors where there are three."""

EXPECTED = "crashed"
PROBLEM = "../vectoradd_py"


def custom_kernel(data):
    A, B = data
    return A + B
