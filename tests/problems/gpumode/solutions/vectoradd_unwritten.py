"""Returns the buffer as it came."""

EXPECTED = "wrong"
PROBLEM = "../vectoradd_py"


def custom_kernel(data):
    return data[2]
