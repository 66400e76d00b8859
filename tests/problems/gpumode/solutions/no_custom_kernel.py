"""Calls its function kernel."""

EXPECTED = "unusable"
PROBLEM = "../vectoradd_py"


def kernel(data):
    A, B, _ = data
    return A + B
