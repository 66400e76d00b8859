"""A task whose reference.py is missing."""

EXPECTED = "unusable"
PROBLEM = "../no_reference_py"


def custom_kernel(data):
    return data
