"""Doubles its input, which is within the spread of the random reference."""

EXPECTED = "unusable"
PROBLEM = "../dropout_py"

from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    return 2 * data
