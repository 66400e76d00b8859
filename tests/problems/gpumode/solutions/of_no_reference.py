"""A task whose reference.py is not there."""

EXPECTED = "unusable"
PROBLEM = "../no_reference_py"


def custom_kernel(data):
    return data
