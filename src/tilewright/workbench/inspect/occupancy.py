"""Theoretical occupancy: blocks per SM by the documented allocation rules, and the limiting resource.

NVIDIA: CUDA C++ Programming Guide, table of compute capabilities, and `cuda_occupancy.h` of the toolkit, which a test
compares with this file. AMD: CDNA 3 and CDNA 4 instruction set guides and LLVM's AMDGPU usage guide (a compute unit is
an SM, a wave a warp, a workgroup a block). Achieved occupancy may be lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.hardware import GPU
from tilewright.workbench.inspect.resources import RESERVED, Resources

PARTITIONS = 4  # per SM, each with a quarter of the registers and warps
MAX_THREADS = 1024  # per block

# NVIDIA, compute capability 7.0 and later
REGISTER_UNIT = 256  # registers; allocation granularity per warp
SHARED_UNIT = 128  # bytes; allocation granularity per block
VOLTA_SHARED_UNIT = 256  # before 8.0, where CUDA reserves no shared memory per block
MAX_REGISTERS = 256  # per thread

# AMD, gfx90a and later
VGPRS = 512  # per lane of a SIMD, divided among its waves
VGPR_UNIT = 8
WAVES_PER_SIMD = 8
LDS_UNIT = {"gfx90a": 512, "gfx942": 512, "gfx950": 1280}  # bytes


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps per SM, the fraction of the maximum warps, and the limits by resource."""

    blocks: int  # 0 if the kernel cannot be launched
    warps: int
    share: float
    limits: dict[str, int]  # blocks per SM by resource: warps, blocks, registers, shared

    @property
    def limiter(self) -> str:
        """The limiting resources; empty at full occupancy."""
        if self.share == 1:
            return ""
        return " and ".join(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(gpu: GPU, used: Resources, threads: int) -> Occupancy:
    """Return the occupancy of blocks of `threads`."""
    warps = math.ceil(threads / gpu.warp)
    limits = _amd_limits(gpu, used, warps) if gpu.is_amd else _nvidia_limits(gpu, used, warps)
    if threads > MAX_THREADS:
        limits["warps"] = 0
    if used.shared > gpu.shared_per_block:
        limits["shared"] = 0
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limits)


def _nvidia_limits(gpu: GPU, used: Resources, warps: int) -> dict[str, int]:
    limits = {"warps": gpu.warps_per_sm // warps, "blocks": gpu.blocks_per_sm}
    per_warp = _round_up(used.registers * gpu.warp, REGISTER_UNIT)
    if per_warp:
        per_partition = gpu.registers_per_sm // PARTITIONS // per_warp
        # A launch is checked as if each partition got the same number of warps.
        fits = per_warp * _round_up(warps, PARTITIONS) <= gpu.registers_per_sm and used.registers <= MAX_REGISTERS
        limits["registers"] = per_partition * PARTITIONS // warps if fits else 0
    is_before_ampere = int(gpu.arch.removeprefix("sm_")) < 80
    allocated = (used.shared, VOLTA_SHARED_UNIT) if is_before_ampere else (used.shared + RESERVED, SHARED_UNIT)
    if shared := _round_up(*allocated):
        limits["shared"] = gpu.shared_per_sm // shared
    return limits


def _amd_limits(gpu: GPU, used: Resources, warps: int) -> dict[str, int]:
    per_simd = min(WAVES_PER_SIMD, VGPRS // max(_round_up(used.registers, VGPR_UNIT), VGPR_UNIT))
    limits = {"warps": gpu.warps_per_sm // warps, "registers": per_simd * PARTITIONS // warps}
    if used.shared:
        limits["shared"] = gpu.shared_per_sm // _round_up(used.shared, LDS_UNIT[gpu.arch])
    return limits


def _round_up(amount: int, step: int) -> int:
    return math.ceil(amount / step) * step
