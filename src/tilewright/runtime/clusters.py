"""Rows held in the registers of a thread block cluster (`ops/include/rows.cuh`): how a row is split over its blocks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.cuda import MAX_PORTABLE_CLUSTER, CudaLaunch, CudaSource, is_installed
from tilewright.runtime.sizes import cdiv, next_power_of_2

VECTOR, CACHE_LINE = 16, 128  # bytes of one access, and of an L2 cache line
MAX_BLOCKS = 16  # per cluster
THREADS = (128, 256, 512, 1024)  # per block
VECTORS_PER_THREAD = {1: 8, 2: 4}  # held in registers, by the number of tensors whose rows are held at once
MAX_VECTORS_ONE_BLOCK = 4096  # per row that one block takes


@dataclass(frozen=True)
class Rows:
    """M rows of N elements. `is_aligned`: the first one starts at a multiple of 16 bytes, which clusters require."""

    M: int
    N: int
    dtype: torch.dtype
    device: int
    is_aligned: bool

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def block(self) -> int:
        return next_power_of_2(self.N)

    @property
    def has_edges(self) -> bool:
        """Return whether rows start and end inside a vector."""
        return (self.N * self.itemsize) % VECTOR != 0

    @property
    def vectors(self) -> int:
        """Return how many vectors cover a row wherever it starts, rounded up to a power of two."""
        edge = VECTOR - self.itemsize if self.has_edges else 0
        return next_power_of_2(cdiv(self.N * self.itemsize + edge, VECTOR))

    def fit_cluster(self, tensors: int) -> bool:
        """Return whether a cluster holds a row of each of that many tensors."""
        return self.is_aligned and self.vectors <= max_vectors_per_block(tensors) * max_cluster(self.device)

    def split(self, blocks: int, capacity: int) -> tuple[int, int]:
        """Return the elements per block, whole cache lines, and the alignment of the first block's part.

        The alignment is a cache line where the capacity of the cluster, in vectors, allows it.
        """
        unit = self.itemsize if self.has_edges else VECTOR
        align = CACHE_LINE if self.N * self.itemsize + CACHE_LINE - unit <= capacity * VECTOR else VECTOR
        part = cdiv(cdiv(self.N * self.itemsize + align - unit, blocks), CACHE_LINE) * CACHE_LINE
        return part // self.itemsize, align


def max_vectors_per_block(tensors: int) -> int:
    """Return how many vectors of each of that many tensors a block can hold."""
    return VECTORS_PER_THREAD[tensors] * THREADS[-1]


def cluster_choices(tensors: int, vectors: int) -> list[Config]:
    """Return the ways to split a row of that many vectors over threads and blocks."""
    splits = [{"threads": threads, "blocks": vectors // (VECTORS_PER_THREAD[tensors] * threads)} for threads in THREADS]
    return [split for split in splits if split["blocks"] in (1, 2, 4, 8, MAX_BLOCKS)] or [one_block(THREADS[0])]


def one_block(threads: int) -> Config:
    """Return a split that every GPU supports."""
    return {"threads": threads, "blocks": 1}


def cluster_default(tensors: int, vectors: int) -> Config:
    """Return one block for short rows, then clusters of small blocks, which hide each other's latency."""
    choices = cluster_choices(tensors, vectors)
    single = next((c for c in choices if c["blocks"] == 1 and vectors <= MAX_VECTORS_ONE_BLOCK), None)
    portable = [c for c in choices if c["blocks"] <= MAX_PORTABLE_CLUSTER] or choices
    return single or next((c for c in portable if c["threads"] >= 256 * tensors), portable[-1])


def cluster_launch(
    table: ConfigTable,
    source: CudaSource,
    kernel: str,
    rows: Rows,
    tensors: int,
    flags: tuple[bool, ...],
    *numbers: int | float,
) -> CudaLaunch:
    """Return a launch of `kernel<T, VECTORS_PER_THREAD, flags…>` with one cluster per row."""
    if has_clusters(rows.device):
        config = table(rows.device, kernel, rows.itemsize, rows.vectors)
    else:
        config = one_block(max(THREADS[0], rows.vectors // VECTORS_PER_THREAD[tensors]))
    threads, blocks = config["threads"], config["blocks"]
    arguments = ["T", VECTORS_PER_THREAD[tensors], *("true" if flag else "false" for flag in flags)]
    name = f"{kernel}<{', '.join(map(str, arguments))}>"
    split = rows.split(blocks, blocks * threads * VECTORS_PER_THREAD[tensors])
    return source.prepare(name, rows.dtype, rows.device, (rows.M,), threads, *numbers, *split, cluster=blocks)


@functools.cache
def has_clusters(device: int) -> bool:
    is_nvidia = device >= 0 and torch.version.hip is None and is_installed()
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def max_cluster(device: int) -> int:
    """Return the blocks of the largest cluster of this GPU; 0 without CUDA C++."""
    if device < 0 or torch.version.hip is not None or not is_installed():
        return 0
    return MAX_BLOCKS if has_clusters(device) else 1
