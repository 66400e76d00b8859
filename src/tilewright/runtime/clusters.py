"""Rows that the blocks of a cluster hold between them (`cuda/rows.cuh`): how they are shared out."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tilewright.runtime.configs import Config, Tuned
from tilewright.runtime.cuda import PORTABLE_CLUSTER, Prepared, Source, is_installed
from tilewright.runtime.sizes import cdiv, next_power_of_2

PACK, LINE = 16, 128  # bytes of an access, and of a line of the cache
MOST_BLOCKS = 16  # of a cluster
THREADS = (128, 256, 512, 1024)  # of a block
PACKS = {1: 8, 2: 4}  # a thread, of so many tensors at once: their rows are held in registers
LARGEST_ALONE = 4096  # packs of a row that one block takes


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
        return next_power_of_2(self.N)

    @property
    def has_edges(self) -> bool:
        return (self.N * self.size) % PACK != 0

    @property
    def packs(self) -> int:
        """How many packs hold a row wherever it begins, as a power of two."""
        edge = PACK - self.size if self.has_edges else 0
        return next_power_of_2(cdiv(self.N * self.size + edge, PACK))

    def fit_a_cluster(self, tensors: int) -> bool:
        return self.is_aligned and self.packs <= most_packs(tensors) * most_blocks(self.device)

    def cut(self, blocks: int, room: int) -> tuple[int, int]:
        """The elements of each block's piece, whole lines of the cache; and on what boundary the first piece begins,
        which is a line's where the packs that the cluster has room for can lie so."""
        unit = self.size if self.has_edges else PACK
        align = LINE if self.N * self.size + LINE - unit <= room * PACK else PACK
        return cdiv(cdiv(self.N * self.size + align - unit, blocks), LINE) * LINE // self.size, align


def most_packs(tensors: int) -> int:
    """The most that a block can hold of each of so many tensors."""
    return PACKS[tensors] * THREADS[-1]


def cluster_choices(tensors: int, packs: int) -> list[Config]:
    """Ways to share out a row of each of so many tensors."""
    shares = [{"threads": threads, "blocks": packs // (PACKS[tensors] * threads)} for threads in THREADS]
    return [share for share in shares if share["blocks"] in (1, 2, 4, 8, MOST_BLOCKS)] or [one_block(THREADS[0])]


def one_block(threads: int) -> Config:
    """A row alone, as every GPU can hold it."""
    return {"threads": threads, "blocks": 1}


def cluster_default(tensors: int, packs: int) -> Config:
    """One block, then clusters of small blocks, which hide each other's waiting."""
    choices = cluster_choices(tensors, packs)
    alone = next((c for c in choices if c["blocks"] == 1 and packs <= LARGEST_ALONE), None)
    portable = [c for c in choices if c["blocks"] <= PORTABLE_CLUSTER] or choices
    return alone or next((c for c in portable if c["threads"] >= 256 * tensors), portable[-1])


def clusters(
    table: Tuned, source: Source, kernel: str, rows: Rows, tensors: int, flags: tuple[bool, ...], *numbers: int | float
) -> Prepared:
    """A launch of `kernel<T, EACH, …>` with a cluster for each row."""
    if has_clusters(rows.device):
        config = table(rows.device, kernel, rows.size, rows.packs)
    else:
        config = one_block(max(THREADS[0], rows.packs // PACKS[tensors]))
    threads, blocks = config["threads"], config["blocks"]
    kinds = ["T", PACKS[tensors], *("true" if flag else "false" for flag in flags)]
    name = f"{kernel}<{', '.join(map(str, kinds))}>"
    cut = rows.cut(blocks, blocks * threads * PACKS[tensors])
    return source.prepare(name, rows.dtype, rows.device, (rows.M,), threads, *numbers, *cut, cluster=blocks)


@functools.cache
def has_clusters(device: int) -> bool:
    is_nvidia = device >= 0 and torch.version.hip is None and is_installed()
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def most_blocks(device: int) -> int:
    """The largest cluster of this GPU; 0 without CUDA C++."""
    if device < 0 or torch.version.hip is not None or not is_installed():
        return 0
    return MOST_BLOCKS if has_clusters(device) else 1
