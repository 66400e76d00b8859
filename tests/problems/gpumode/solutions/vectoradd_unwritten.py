"""Returns the output buffer unwritten."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_py"


def custom_kernel(data):
    return data[2]
