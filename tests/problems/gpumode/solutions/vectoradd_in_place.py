"""Adds into its first input, and returns that: the values are right, the input is gone."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_py"


def custom_kernel(data):
    A, B, _ = data
    A += B
    return A
