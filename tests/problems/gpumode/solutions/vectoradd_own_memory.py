"""Returns memory of its own and leaves the buffer alone."""

EXPECTED = "right"
PROBLEM = "../vectoradd_py"

from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    A, B, _ = data
    return A + B
