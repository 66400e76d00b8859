"""The norms in CUDA C++ (`norm.cu`): a thread block cluster holds a row in registers, however long."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.runtime.clusters import MAX_BLOCKS, VECTOR, has_clusters, max_cluster
from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.cuda import CudaLaunch, CudaSource
from tilewright.runtime.sizes import cdiv, next_power_of_2

CUDA = CudaSource(  # a few of the many instances, compiled in the tests
    "norm/norm.cu",
    "norm_fwd<T, T, 8, true, false>",
    "norm_fwd<T, float, 2, false, true>",
    "norm_bwd<T, T, 2, true, false, true>",
    "norm_bwd<T, float, 1, false, true, false>",
)
WARP = 32  # threads
MAX_CLUSTER = 8  # blocks; backward also tries MAX_BLOCKS small ones
MAX_THREADS = 512 * MAX_CLUSTER  # per cluster; as in norm.cu
MAX_BLOCK_THREADS = {  # by vectors per thread; as in norm.cu
    "forward": {1: 512, 2: 512, 4: 256, 8: 512},
    "backward": {1: 512, 2: 512},
}
CLUSTER_RANGE = {  # row lengths, from and to, at which "cuda" beats "triton" on an H200
    ("forward", "rms_norm"): (2048, 32768),
    ("forward", "layer_norm"): (8192, 32768),
    ("forward", "add_rms_norm"): (2048, 32768),
    ("forward", "add_layer_norm"): (2048, 32768),
    ("backward", "rms_norm"): (1024, 32768),
    ("backward", "layer_norm"): (1024, 32768),
    ("backward", "add_rms_norm"): (1024, 32768),
    ("backward", "add_layer_norm"): (1024, 32768),
}


def _cluster_choices(op: str, direction: str, size: int, vectors: int) -> list[Config]:
    """Return the splits of a row over blocks and vectors per thread, largest blocks last."""
    found, way = [], direction.removeprefix("cuda-")
    for per_thread, largest in MAX_BLOCK_THREADS[way].items():
        if per_thread == 8 and op.startswith("add_"):  # two tensors do not fit the registers
            continue
        if way == "forward" and per_thread == 1 and vectors > 512:  # too little work per thread
            continue
        most = MAX_CLUSTER if way == "forward" else MAX_BLOCKS
        sizes = [(n, vectors // (per_thread * n)) for n in (16, 8, 4, 2, 1) if n <= most]
        fits = [n for n, threads in sizes if (64 if n == 1 else 128) <= threads <= min(largest, MAX_THREADS // n)]
        found += [{"each": per_thread, "blocks": blocks} for blocks in fits]
    return found or [{"each": 1, "blocks": 1}]


def _cluster_default(op: str, direction: str, size: int, vectors: int) -> Config:
    """Return the split that wins on average.

    Forward: few blocks, with as many vectors per thread as registers hold. Backward: medium-sized blocks, which hide
    each other's latency.
    """
    wanted = (
        2 if direction == "cuda-backward" or op.startswith("add_") or vectors < 256 else 4 if vectors <= 1024 else 8
    )

    def distance(config: Config) -> tuple[float, ...]:
        per_thread, blocks = config["each"], config["blocks"]
        apart = abs(math.log2(per_thread / wanted))
        if direction == "cuda-forward":
            return blocks, apart
        return apart + abs(math.log2(vectors / (per_thread * blocks) / 256)), blocks

    choices = _cluster_choices(op, direction, size, vectors)
    return min((config for config in choices if config["blocks"] <= MAX_CLUSTER), key=distance)


CLUSTER = ConfigTable("norm.json", _cluster_default, _cluster_choices)


def _max_vectors(direction: str) -> int:
    """Return how many vectors a block holds."""
    return max(per_thread * threads for per_thread, threads in MAX_BLOCK_THREADS[direction].items())


def clusters_win(op: str, direction: str, device: int, N: int) -> bool:
    """Return whether clusters beat Triton programs on rows of N elements."""
    shortest, longest = CLUSTER_RANGE[direction, op]
    return shortest <= N <= longest and has_clusters(device)


def cluster_plan(
    op: str, direction: str, dtype: torch.dtype, weights: torch.dtype, device: int, M: int, N: int, *numbers: float
) -> CudaLaunch | None:
    """Return a cluster launch, or None if clusters cannot hold such rows. All tensors must be aligned.

    The forward launch takes x, residual, weight, bias, y, sum and stats, with the numbers eps and offset; the backward
    one x, weight, stats, dy, dsum, dx and the partial sums of dw and db, one per cluster, with the number offset.
    """
    vectors, rest = divmod(N * dtype.itemsize, VECTOR)
    if rest or vectors > _max_vectors(direction) * min(MAX_CLUSTER, max_cluster(device)):
        return None
    key = (op, f"cuda-{direction}", dtype.itemsize, next_power_of_2(vectors))
    single = [config for config in _cluster_choices(*key) if config["blocks"] == 1]
    if not has_clusters(device) and not single:
        return None
    config = CLUSTER(device, *key) if has_clusters(device) else single[-1]
    per_thread, blocks, is_rms = config["each"], config["blocks"], op.endswith("rms_norm")
    flags = [is_rms, op.startswith("add_"), *([blocks == 1] if direction == "backward" else [])]
    kinds = ("T" if weights == dtype else "float", per_thread, *("true" if flag else "false" for flag in flags))
    kernel = f"norm_{'fwd' if direction == 'forward' else 'bwd'}<T, {', '.join(map(str, kinds))}>"
    threads = WARP * cdiv(vectors, WARP * per_thread * blocks)
    if direction == "forward":
        return CUDA.prepare(kernel, dtype, device, (M,), threads, N, *map(float, numbers), cluster=blocks)
    how = {"shared": threads * per_thread * VECTOR * (weights.itemsize // dtype.itemsize), "cluster": blocks}
    clusters = _balanced_clusters(M, min(M, max(1, CUDA.resident(kernel, dtype, device, threads, **how))))
    return CUDA.prepare(kernel, dtype, device, (clusters,), threads, M, N, *map(float, numbers), **how)


def _balanced_clusters(rows: int, clusters: int) -> int:
    """Return the smallest number of clusters with the same number of rows in the busiest one."""
    return cdiv(rows, cdiv(rows, clusters))


def fits_cluster(x: Tensor) -> bool:
    """Return whether clusters hold the rows of x in either direction."""
    vectors, rest = divmod(x.shape[-1] * x.element_size(), VECTOR)
    return not rest and 0 < vectors <= _max_vectors("backward") * MAX_CLUSTER
