"""Names its function `kernel` instead of `custom_kernel`."""

EXPECTED = "unusable"
PROBLEM = "../vectoradd_py"


def kernel(data):
    A, B, _ = data
    return A + B
