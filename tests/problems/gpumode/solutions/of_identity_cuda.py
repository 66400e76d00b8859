"""A task whose language is CUDA C++."""

EXPECTED = "unusable"
PROBLEM = "../identity_cuda"


def custom_kernel(data):
    return data
