"""The norms in CUDA C++ (`cuda/norm.cu`): a cluster of blocks holds a row, however long."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.runtime.clusters import MOST_BLOCKS, PACK, has_clusters, most_blocks
from tilewright.runtime.configs import Config, Tuned
from tilewright.runtime.cuda import Prepared, Source
from tilewright.runtime.sizes import cdiv, next_power_of_2

CUDA = Source(  # a few of the many instances; each is compiled when it is first called
    "norm/norm.cu",
    "norm_fwd<T, T, 8, true, false>",
    "norm_fwd<T, float, 2, false, true>",
    "norm_bwd<T, T, 2, true, false, true>",
    "norm_bwd<T, float, 1, false, true, false>",
)
WARP = 32  # threads
LARGEST_CLUSTER = 8  # blocks; backward also tries MOST_BLOCKS small ones
MOST_THREADS = 512 * LARGEST_CLUSTER  # of a cluster; as in norm.cu
LARGEST_BLOCK = {  # threads, by packs a thread; as in norm.cu
    "forward": {1: 512, 2: 512, 4: 256, 8: 512},
    "backward": {1: 512, 2: 512},
}
WINS = {  # elements of rows, from and to, with which "cuda" beats "triton" on an H200
    ("forward", "rms_norm"): (2048, 32768),
    ("forward", "layer_norm"): (8192, 32768),
    ("forward", "add_rms_norm"): (2048, 32768),
    ("forward", "add_layer_norm"): (2048, 32768),
    ("backward", "rms_norm"): (1024, 32768),
    ("backward", "layer_norm"): (1024, 32768),
    ("backward", "add_rms_norm"): (1024, 32768),
    ("backward", "add_layer_norm"): (1024, 32768),
}


def _cluster_choices(op: str, direction: str, size: int, packs: int) -> list[Config]:
    """A row held by so many blocks, so many packs a thread. Largest blocks last."""
    found, way = [], direction.removeprefix("cuda-")
    for each, largest in LARGEST_BLOCK[way].items():
        if each == 8 and op.startswith("add_"):  # two tensors do not fit the registers
            continue
        if way == "forward" and each == 1 and packs > 512:  # too little for a thread to do
            continue
        most = LARGEST_CLUSTER if way == "forward" else MOST_BLOCKS
        sizes = [(n, packs // (each * n)) for n in (16, 8, 4, 2, 1) if n <= most]
        fits = [n for n, threads in sizes if (64 if n == 1 else 128) <= threads <= min(largest, MOST_THREADS // n)]
        found += [{"each": each, "blocks": blocks} for blocks in fits]
    return found or [{"each": 1, "blocks": 1}]


def _cluster_default(op: str, direction: str, size: int, packs: int) -> Config:
    """Forward few blocks a row, with as much for a thread as its registers hold; backward blocks of a middling size,
    which hide each other's waiting."""
    wanted = 2 if direction == "cuda-backward" or op.startswith("add_") or packs < 256 else 4 if packs <= 1024 else 8

    def distance(config: Config) -> tuple[float, ...]:
        each, blocks = config["each"], config["blocks"]
        apart = abs(math.log2(each / wanted))
        if direction == "cuda-forward":
            return blocks, apart
        return apart + abs(math.log2(packs / (each * blocks) / 256)), blocks

    choices = _cluster_choices(op, direction, size, packs)
    return min((config for config in choices if config["blocks"] <= LARGEST_CLUSTER), key=distance)


CLUSTER = Tuned("norm.json", _cluster_default, _cluster_choices)


def _most_packs(direction: str) -> int:
    """That a block can hold."""
    return max(each * threads for each, threads in LARGEST_BLOCK[direction].items())


def wins(op: str, direction: str, device: int, N: int) -> bool:
    """Whether clusters beat programs."""
    shortest, longest = WINS[direction, op]
    return shortest <= N <= longest and has_clusters(device)


def by_clusters(
    op: str, direction: str, dtype: torch.dtype, weights: torch.dtype, device: int, M: int, N: int, *numbers: float
) -> Prepared | None:
    """How clusters take such rows, if they can; all tensors must be aligned.

    Forward takes x, residual, weight, bias, y, sum, stats, and eps and offset; backward x, weight, stats, dy, dsum, dx
    and the shares of dw and db, one for each cluster, and offset."""
    packs, rest = divmod(N * dtype.itemsize, PACK)
    if rest or packs > _most_packs(direction) * min(LARGEST_CLUSTER, most_blocks(device)):
        return None
    key = (op, f"cuda-{direction}", dtype.itemsize, next_power_of_2(packs))
    alone = [config for config in _cluster_choices(*key) if config["blocks"] == 1]
    if not has_clusters(device) and not alone:
        return None
    config = CLUSTER(device, *key) if has_clusters(device) else alone[-1]
    each, blocks, is_rms = config["each"], config["blocks"], op.endswith("rms_norm")
    flags = [is_rms, op.startswith("add_"), *([blocks == 1] if direction == "backward" else [])]
    kinds = ("T" if weights == dtype else "float", each, *("true" if flag else "false" for flag in flags))
    kernel = f"norm_{'fwd' if direction == 'forward' else 'bwd'}<T, {', '.join(map(str, kinds))}>"
    threads = WARP * cdiv(packs, WARP * each * blocks)
    if direction == "forward":
        return CUDA.prepare(kernel, dtype, device, (M,), threads, N, *map(float, numbers), cluster=blocks)
    how = {"shared": threads * each * PACK * (weights.itemsize // dtype.itemsize), "cluster": blocks}
    clusters = _shared_out(M, min(M, max(1, CUDA.resident(kernel, dtype, device, threads, **how))))
    return CUDA.prepare(kernel, dtype, device, (clusters,), threads, M, N, *map(float, numbers), **how)


def _shared_out(rows: int, clusters: int) -> int:
    """The fewest clusters that are done as soon as so many: of each as many rows as the most that any has."""
    return cdiv(rows, cdiv(rows, clusters))


def fits_a_cluster(x: Tensor) -> bool:
    """Whether clusters can hold the rows of x in either direction."""
    packs, rest = divmod(x.shape[-1] * x.element_size(), PACK)
    return not rest and 0 < packs <= _most_packs("backward") * LARGEST_CLUSTER
