"""Grid and block sizes, computed on the host: Triton's functions of these names cost microseconds."""

from __future__ import annotations

from collections.abc import Mapping

FEW_PROGRAMS = 512  # about four per multiprocessor of a large GPU
MIN_ELEMENTS_PER_WARP = 128


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


def rows_per_program(M: int, config: Mapping[str, int]) -> int:
    """Return the configured number of rows per program, or fewer where that would leave multiprocessors idle."""
    rows, minimum = config["BLOCK_M"], MIN_ELEMENTS_PER_WARP * config["num_warps"]
    while rows > 1 and cdiv(M, rows) < FEW_PROGRAMS and rows * config["BLOCK_N"] > minimum:
        rows //= 2
    return rows
