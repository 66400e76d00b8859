"""Adds into its first input and returns it: the values are right, the input is overwritten."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_py"


def custom_kernel(data):
    A, B, _ = data
    A += B
    return A
