"""How many blocks of a kernel an SM holds at once, by the documented rules of allocation, and what limits them.

NVIDIA: CUDA C++ Programming Guide, table of compute capabilities, and `cuda_occupancy.h` of the toolkit, against which
a test holds this file. AMD: CDNA 3 and CDNA 4 instruction set guides and LLVM's AMDGPU usage guide (a compute unit is
an SM, a wave a warp, a workgroup a block). Both are upper bounds: what is resident need not be ready.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.hardware import GPU
from tilewright.workbench.inspect.resources import RESERVED, Resources

PARTITIONS = 4  # of an SM, each with a quarter of the registers and warps
MOST_THREADS = 1024  # of a block

# NVIDIA, compute capability 8.0 and later
REGISTERS_AT_ONCE = 256  # given to a warp
SHARED_AT_ONCE = 128  # bytes, given to a block
MOST_REGISTERS = 256  # of a thread

# AMD, gfx90a and later
VGPRS = 512  # of each lane of a SIMD, shared out among its waves
VGPRS_AT_ONCE = 8
WAVES_PER_SIMD = 8
LDS_AT_ONCE = {"gfx942": 512, "gfx950": 1280}  # bytes


@dataclass(frozen=True)
class Occupancy:
    """Of one SM: blocks it holds, the share of its warps they are, and what keeps it from holding more."""

    blocks: int  # 0: the kernel cannot be launched
    warps: int
    share: float
    limits: dict[str, int]  # blocks by resource: warps, blocks, registers, shared

    @property
    def limiter(self) -> str:
        """What runs out first: several where they run out together, nothing where every warp is taken."""
        if self.share == 1:
            return ""
        return " and ".join(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(gpu: GPU, used: Resources, threads: int) -> Occupancy:
    """For blocks of so many threads."""
    warps = math.ceil(threads / gpu.warp)
    limits = _amd_limits(gpu, used, warps) if gpu.is_amd else _nvidia_limits(gpu, used, warps)
    if threads > MOST_THREADS:
        limits["warps"] = 0
    if used.shared > gpu.shared_per_block:
        limits["shared"] = 0
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limits)


def _nvidia_limits(gpu: GPU, used: Resources, warps: int) -> dict[str, int]:
    limits = {"warps": gpu.warps_per_sm // warps, "blocks": gpu.blocks_per_sm}
    of_warp = _up(used.registers * gpu.warp, REGISTERS_AT_ONCE)
    if of_warp:
        in_partition = gpu.registers_per_sm // PARTITIONS // of_warp
        # A launch is checked as if each partition got the same number of warps.
        is_possible = of_warp * _up(warps, PARTITIONS) <= gpu.registers_per_sm and used.registers <= MOST_REGISTERS
        limits["registers"] = in_partition * PARTITIONS // warps if is_possible else 0
    limits["shared"] = gpu.shared_per_sm // _up(used.shared + RESERVED, SHARED_AT_ONCE)
    return limits


def _amd_limits(gpu: GPU, used: Resources, warps: int) -> dict[str, int]:
    in_simd = min(WAVES_PER_SIMD, VGPRS // max(_up(used.registers, VGPRS_AT_ONCE), VGPRS_AT_ONCE))
    limits = {"warps": gpu.warps_per_sm // warps, "registers": in_simd * PARTITIONS // warps}
    if used.shared:
        limits["shared"] = gpu.shared_per_sm // _up(used.shared, LDS_AT_ONCE[gpu.arch])
    return limits


def _up(amount: int, step: int) -> int:
    return math.ceil(amount / step) * step
