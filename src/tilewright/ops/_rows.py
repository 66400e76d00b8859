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
THREADS = (128, 256, 512, 1024)  # of a block
LARGEST_ALONE = 4096  # packs of a row that one block takes
PACKS = {1: 8, 2: 4}  # a thread, of so many tensors at once: their rows are held in registers


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
    return PACKS[tensors] * THREADS[-1]


def cluster_choices(tensors: int, packs: int) -> list[Config]:
    """Every way to share out a row of each of so many tensors."""
    each = PACKS[tensors]
    fitting = [threads for threads in THREADS if 1 <= packs // (each * threads) <= MOST_BLOCKS] or [THREADS[0]]
    return [{"threads": threads, "blocks": max(1, packs // (each * threads))} for threads in fitting]


def cluster_default(tensors: int, packs: int) -> Config:
    """One block, then clusters of small blocks, which hide each other's waiting."""
    choices = cluster_choices(tensors, packs)
    alone = next((c for c in choices if c["blocks"] == 1 and packs <= LARGEST_ALONE), None)
    return alone or next((c for c in choices if c["threads"] >= 256 * tensors), choices[-1])


@functools.cache
def _most_blocks(device: int) -> int:
    """The largest cluster of this GPU; 0 without CUDA C++."""
    if device < 0 or torch.version.hip is not None or not is_installed():
        return 0
    return MOST_BLOCKS if torch.cuda.get_device_capability(device)[0] >= 9 else 1
