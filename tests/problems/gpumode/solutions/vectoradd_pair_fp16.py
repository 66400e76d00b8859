"""Adds in float16, which the task's tolerance of 5e-3 lets pass."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_pair_py"


def custom_kernel(data):
    A, B = data
    return (A.half() + B.half()).to(A.dtype)
