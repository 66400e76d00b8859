"""Sizes of grids and blocks on the host, where Triton's own functions of these names cost microseconds."""

from __future__ import annotations


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
