"""Adds in bfloat16."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_py"


def custom_kernel(data):
    A, B, output = data
    output[...] = (A.bfloat16() + B.bfloat16()).to(A.dtype)
    return output
