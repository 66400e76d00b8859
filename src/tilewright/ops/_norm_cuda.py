"""The norms in CUDA C++ (`cuda/norm.cu`): a cluster of blocks holds a row, however long."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.ops._cuda import Prepared, Source
from tilewright.ops._launch import shared_memory
from tilewright.ops._rows import PACK, has_clusters, most_blocks
from tilewright.ops._sizes import cdiv, next_power_of_2
from tilewright.ops._tuned import Config, Tuned

CUDA = Source(  # a few of the many instances; each is compiled when it is first called
    "norm.cu",
    "norm_fwd<T, T, 4, true, false, true>",
    "norm_fwd<T, float, 2, false, true, false>",
    "norm_bwd<T, T, 2, true, false, true>",
    "norm_bwd<T, float, 1, false, true, false>",
)
WARP = 32  # threads
EVERY = 2**20  # waves: a cluster for each row
LARGEST_CLUSTER = 8  # blocks
LARGEST_BLOCK = {  # threads, by packs a thread; as in norm.cu
    "forward": {1: 512, 2: 512, 4: 256, 8: 512},
    "backward": {1: 512, 2: 512},
}
EXCHANGED = 5 * 1024  # bytes of shared memory that weights leave for what blocks tell each other
WINS = {  # elements of rows, from and to, with which "cuda" beats "triton" on an H200
    ("forward", "rms_norm"): (2048, 32768),
    ("forward", "layer_norm"): (8192, 32768),
    ("forward", "add_rms_norm"): (1024, 32768),
    ("forward", "add_layer_norm"): (1024, 32768),
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
        fits = [n for n in (8, 4, 2, 1) if (64 if n == 1 else 128) <= packs // (each * n) <= largest]
        waves = (1, 4, EVERY) if way == "forward" else (1,)  # more would be more shares to add up
        found += [{"each": each, "blocks": blocks, "waves": n} for blocks in fits for n in waves]
    return found or [{"each": 1, "blocks": 1, "waves": 1}]


def _cluster_default(op: str, direction: str, size: int, packs: int) -> Config:
    """Small blocks hide each other's waiting; clusters of several stay, with the next row ahead."""
    wanted = 4 if direction == "cuda-forward" else 2

    def distance(config: Config) -> tuple[float, ...]:
        threads = packs / (config["each"] * config["blocks"])
        waves = config["waves"] == (EVERY if config["blocks"] == 1 else 4)
        return abs(math.log2(config["each"] / wanted)) + abs(math.log2(threads / 256)), not waves

    return min(_cluster_choices(op, direction, size, packs), key=distance)


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
    stays = config["waves"] < EVERY
    flags = [is_rms, op.startswith("add_"), stays if direction == "forward" else blocks == 1]
    kinds = ("T" if weights == dtype else "float", each, *("true" if flag else "false" for flag in flags))
    kernel = f"norm_{'fwd' if direction == 'forward' else 'bwd'}<T, {', '.join(map(str, kinds))}>"
    threads = WARP * cdiv(packs, WARP * each * blocks)
    shared = threads * each * PACK * (weights.itemsize // dtype.itemsize)
    if direction == "forward":
        shared *= stays * (1 if is_rms else 2)
    if shared > shared_memory(device) - EXCHANGED:
        return None
    how = {"shared": shared, "cluster": blocks}
    at_once = max(1, CUDA.resident(kernel, dtype, device, threads, **how))
    clusters = _shared_out(M, min(M, at_once * config["waves"]))
    return CUDA.prepare(kernel, dtype, device, (clusters,), threads, M, N, *map(float, numbers), **how)


def _shared_out(rows: int, clusters: int) -> int:
    """The fewest clusters that are done as soon as so many: of each as many rows as the most that any has."""
    return cdiv(rows, cdiv(rows, clusters))


def fits_a_cluster(x: Tensor) -> bool:
    """Whether clusters can hold the rows of x in either direction."""
    packs, rest = divmod(x.shape[-1] * x.element_size(), PACK)
    return not rest and 0 < packs <= _most_packs("backward") * LARGEST_CLUSTER
