"""How rows are split over the lanes, the block or the cluster that holds them (`ops/include/rows.cuh`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.cuda import MAX_PORTABLE_CLUSTER, is_installed
from tilewright.runtime.sizes import cdiv, next_power_of_2, quarter_octave

VECTOR, CACHE_LINE = 16, 128  # bytes of one access, and of an L2 cache line
WARP, MAX_THREADS = 32, 1024  # per block
MAX_BLOCKS = 16  # per cluster
MIN_CLUSTER_THREADS = 4 * WARP  # per block of a cluster of several
LANES = (4, 8, 16, 32)  # numbers of lanes that may share a row
BLOCKS = (1, 2, 4, 8, MAX_BLOCKS)
LANE_THREADS = 4 * WARP  # per block of rows that lanes share
VECTORS_PER_THREAD = {1: 8, 2: 4}  # that registers hold, by the number of tensors whose rows are held at once
FEW_VECTORS = 5  # per lane: more take longer than idle lanes do
SMALL_BLOCK = 65536 // 3  # registers: three such blocks fit a multiprocessor
MAX_USUAL_THREADS = 512  # more start and wait together too often


class Held(NamedTuple):
    """The vectors that a thread holds in registers: of each of that many tensors, and not fewer than `least`."""

    tensors: int
    least: int = 1

    @property
    def vectors(self) -> int:
        """Return how many vectors of each tensor the registers hold."""
        return VECTORS_PER_THREAD[self.tensors]


@dataclass(frozen=True)
class Rows:
    """M rows of N elements. Those that are written start at a multiple of 16 bytes."""

    M: int
    N: int
    dtype: torch.dtype
    device: int

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
        """Return how many vectors cover a row wherever it starts."""
        edge = VECTOR - self.itemsize if self.has_edges else 0
        return cdiv(self.N * self.itemsize + edge, VECTOR)

    def fit_cluster(self, held: Held) -> bool:
        """Return whether a cluster holds a row of each tensor."""
        return self.vectors <= held.vectors * MAX_THREADS * max_cluster(self.device)

    def split(self, blocks: int, capacity: int) -> tuple[int, int]:
        """Return the elements per block, whole cache lines, and the alignment of the first block's part.

        The alignment is a cache line where the capacity of the cluster, in vectors, allows it.
        """
        unit = self.itemsize if self.has_edges else VECTOR
        align = CACHE_LINE if self.N * self.itemsize + CACHE_LINE - unit <= capacity * VECTOR else VECTOR
        part = cdiv(cdiv(self.N * self.itemsize + align - unit, blocks), CACHE_LINE) * CACHE_LINE
        return part // self.itemsize, align


def cluster_choices(held: Held, vectors: int) -> list[Config]:
    """Return the numbers of blocks that can share a row of that many vectors."""
    return [{"blocks": n} for n in BLOCKS if _splits(held, vectors, n)]


def warp_choices(held: Held, vectors: int) -> list[Config]:
    """Return the numbers of lanes that can share a row of that many vectors."""
    return [{"lanes": n} for n in LANES if vectors <= n * held.vectors]


def row_choices(held: Held, vectors: int) -> list[Config]:
    """Return the ways to split a row of that many vectors over lanes or blocks."""
    return warp_choices(held, vectors) + cluster_choices(held, vectors)


def cluster_default(held: Held, vectors: int, most: int = MAX_PORTABLE_CLUSTER) -> Config:
    """Return the fewest blocks, up to `most`, that are small enough to hide each other's latency."""
    choices = cluster_choices(held, vectors)
    fit = [config for config in choices if config["blocks"] <= most]
    small = (c for c in fit if _registers(held, *best_threads(held, vectors, c["blocks"])) <= SMALL_BLOCK)
    return next(small, (fit or choices)[-1])


def row_default(held: Held, vectors: int, most: int = MAX_PORTABLE_CLUSTER) -> Config:
    """Return the lanes with the fewest idle registers for short rows, the fewest blocks for others.

    Forward, few lanes reduce a row in fewer steps; backward has twice the loads to hide.
    """
    choices = warp_choices(held, vectors)
    few = [c for c in choices if cdiv(vectors, c["lanes"]) <= FEW_VECTORS] or choices
    if not few:
        return cluster_default(held, vectors, most)
    return min(
        few, key=lambda c: (c["lanes"] * cdiv(vectors, c["lanes"]), c["lanes"] if held.tensors == 1 else -c["lanes"])
    )


@functools.cache
def best_threads(held: Held, vectors: int, blocks: int) -> tuple[int, int]:
    """Return the threads of each block, and the vectors that each thread holds.

    As many blocks as possible fit an SM, then few registers are idle, then a thread holds about four vectors.
    """
    part = _block_vectors(vectors, blocks)

    def cost(split: tuple[int, int]) -> tuple[float, ...]:
        threads, each = split
        registers = max(SMALL_BLOCK, _registers(held, threads, each))
        return threads > MAX_USUAL_THREADS, registers, round(threads * each / part, 1), abs(each - 4)

    return min(_splits(held, vectors, blocks), key=cost)


def _registers(held: Held, threads: int, each: int) -> int:
    """Return about how many registers a block takes."""
    return threads * (32 if held.tensors * each <= 4 else 64)


def _splits(held: Held, vectors: int, blocks: int) -> list[tuple[int, int]]:
    """Return the threads of a block and the vectors of each that hold a row, as few threads as possible."""
    part = _block_vectors(vectors, blocks)
    found = [(cdiv(part, each * WARP) * WARP, each) for each in range(held.vectors, held.least - 1, -1)]
    minimum = WARP if blocks == 1 else MIN_CLUSTER_THREADS
    return [split for split in found if minimum <= split[0] <= MAX_THREADS]


def _block_vectors(vectors: int, blocks: int) -> int:
    """Return the vectors of the first block's part of a row: whole cache lines, if there are more."""
    lines = CACHE_LINE // VECTOR
    return vectors if blocks == 1 else cdiv(cdiv(vectors, blocks), lines) * lines


class RowLaunch(NamedTuple):
    """How a launch splits rows."""

    grid: tuple[int, ...]  # in clusters
    threads: int
    blocks: int  # per cluster
    lanes: int  # that share a row; 0 if a cluster does
    each: int  # vectors per thread
    numbers: tuple[int, int]  # elements per block, and the alignment of its part


def row_launch(table: ConfigTable, kernel: str, rows: Rows, held: Held) -> RowLaunch:
    """Return how a kernel splits rows, as the table says."""
    key = kernel, rows.itemsize, quarter_octave(rows.vectors)
    config = table(rows.device, *key) if has_clusters(rows.device) else table.default(*key, 1)
    blocks, lanes = config.get("blocks", 1), config.get("lanes", 0)
    if lanes:
        threads, each = LANE_THREADS, cdiv(rows.vectors, lanes)
    else:
        threads, each = best_threads(held, rows.vectors, blocks)
    grid = cdiv(rows.M, threads // lanes) if lanes else rows.M
    numbers = rows.split(blocks, each * (lanes or threads * blocks))
    return RowLaunch((grid,), threads, blocks, lanes, each, numbers)


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
