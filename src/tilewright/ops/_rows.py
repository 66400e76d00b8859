"""Rows that the blocks of a cluster hold between them (`cuda/rows.cuh`): how they are shared out."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from tilewright.ops._cuda import is_installed
from tilewright.ops._tuned import Config

PACK = 16  # bytes of an access
MOST_BLOCKS = 16  # of a cluster
# Packs a thread and threads a block, in shared memory and, of so many tensors at once, in registers.
IN_SHARED = tuple((each, threads) for each in (8, 16) for threads in (128, 256, 512))
IN_REGISTERS = {
    1: tuple((8, threads) for threads in (128, 256, 512, 1024)),
    2: tuple((4, t) for t in (128, 256, 512, 1024)),
}


@dataclass(frozen=True)
class Rows:
    """What settles how rows are computed: M of them with N elements each; a cluster wants the first one aligned."""

    M: int
    N: int
    dtype: torch.dtype
    device: int
    is_aligned: bool

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def block(self) -> int:
        return triton.next_power_of_2(self.N)

    @property
    def has_edges(self) -> bool:
        return (self.N * self.size) % PACK != 0

    @property
    def packs(self) -> int:
        """How many packs hold a row wherever it begins, as a power of two."""
        edge = PACK - self.size if self.has_edges else 0
        return triton.next_power_of_2(triton.cdiv(self.N * self.size + edge, PACK))

    def fit_a_cluster(self, tensors: int) -> bool:
        return self.is_aligned and self.packs <= most_packs(tensors) * _most_blocks(self.device)


def most_packs(tensors: int) -> int:
    """The most that a block can hold of each of so many tensors."""
    return max(each * threads for each, threads in _shapes(tensors))


def cluster_choices(tensors: int, packs: int) -> list[Config]:
    """Every way to share out a row of each of so many tensors."""
    return [
        {"each": each, "threads": threads, "blocks": max(1, packs // (each * threads)), "shared": shared}
        for shared, shapes in ((True, IN_SHARED if tensors == 1 else ()), (False, IN_REGISTERS[tensors]))
        for each, threads in shapes
        if packs <= each * threads * MOST_BLOCKS and (packs >= each * threads // 2 or threads == 128)
    ]


def cluster_default(tensors: int, packs: int) -> Config:
    """Small clusters of small blocks: blocks hide each other's waiting, and a large cluster waits long."""
    choices = cluster_choices(tensors, packs)
    return min(choices, key=lambda c: (c["blocks"] > 4, c["blocks"] > 8, c["threads"] > 256, c["blocks"]))


def shared_bytes(config: Config) -> int:
    return config["each"] * config["threads"] * PACK if config["shared"] else 0


def _shapes(tensors: int) -> tuple[tuple[int, int], ...]:
    return (*IN_SHARED, *IN_REGISTERS[1]) if tensors == 1 else IN_REGISTERS[tensors]


@functools.cache
def _most_blocks(device: int) -> int:
    """The largest cluster of this GPU; 0 without CUDA C++."""
    if device < 0 or torch.version.hip is not None or not is_installed():
        return 0
    return MOST_BLOCKS if torch.cuda.get_device_capability(device)[0] >= 9 else 1
