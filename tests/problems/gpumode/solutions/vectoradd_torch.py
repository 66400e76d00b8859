"""Writes into the output buffer and returns it."""

EXPECTED = "right"
PROBLEM = "../vectoradd_py"

#!POPCORN leaderboard vectoradd
#!POPCORN gpu H100

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    A, B, output = data
    torch.add(A, B, out=output)
    return output
