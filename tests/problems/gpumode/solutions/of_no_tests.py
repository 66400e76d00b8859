"""A task without tests."""

EXPECTED = "unusable"
PROBLEM = "../no_tests_py"


def custom_kernel(data):
    A, B = data
    return A + B
