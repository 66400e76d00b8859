"""Sizes of grids and blocks on the host, where Triton's own functions of these names cost microseconds."""

from __future__ import annotations

from collections.abc import Mapping


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


FEW = 512  # programs: about four for each multiprocessor of a large GPU
ELEMENTS = 128  # of a warp, at least


def rows_each(M: int, config: Mapping[str, int]) -> int:
    """The rows of a program: as configured where there are many, else fewer, so that more multiprocessors have some and
    each thread has little to do one after the other."""
    rows, least = config["BLOCK_M"], ELEMENTS * config["num_warps"]
    while rows > 1 and cdiv(M, rows) < FEW and rows * config["BLOCK_N"] > least:
        rows //= 2
    return rows
