"""Grid and block sizes, computed on the host: Triton's functions of these names cost microseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright.runtime.crossovers import PerGPU

FEW_PROGRAMS = PerGPU("programs that fill the GPU", lambda gpu: 4 * gpu.sms)
MIN_ELEMENTS_PER_WARP = 128


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


def quarter_octave(n: int) -> int:
    """Return n rounded up to 5, 6, 7 or 8 eighths of the next power of two."""
    step = max(1, next_power_of_2(n) // 8)
    return cdiv(n, step) * step


def vector_hint(*sizes: int) -> int:
    """Return the power of two up to 8 that divides all sizes, for kernels to say so, or 1 if there is nothing to say.

    Triton sees whether an argument is a multiple of 16, not of 8, 4 or 2. A kernel that does `N = N // VECTOR * VECTOR`
    gets accesses of 16 bytes in rows of 1000 elements of 16 bits too.
    """
    common = math.gcd(*sizes)
    return 1 if common % 16 == 0 else math.gcd(common, 8)


def rows_per_program(M: int, config: Mapping[str, int], device: int) -> int:
    """Return the configured number of rows per program, or fewer where that would leave multiprocessors idle."""
    rows, minimum = config["BLOCK_M"], MIN_ELEMENTS_PER_WARP * config["num_warps"]
    few = FEW_PROGRAMS[device]
    while rows > 1 and cdiv(M, rows) < few and rows * config["BLOCK_N"] > minimum:
        rows //= 2
    return rows
