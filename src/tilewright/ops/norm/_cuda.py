"""The norms in CUDA C++ (`norm.cu`): a thread block cluster holds a row in registers, wherever it starts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.runtime.clusters import MAX_BLOCKS, VECTOR, has_clusters, max_cluster
from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.cuda import CudaLaunch, CudaSource
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.sizes import FEW_PROGRAMS, cdiv, quarter_octave

CUDA = CudaSource(  # a few of the many instances, compiled in the tests
    "norm/norm.cu",
    "norm_fwd<T, T, 8, true, false>",
    "norm_fwd_uneven<T, float, 2, false, true, true>",
    "norm_bwd<T, T, 2, true, false, true, false>",
    "norm_bwd<T, float, 1, false, true, false, true>",
)
WARP = 32  # threads
MAX_FEW = 8192  # elements of the longest rows that Triton is faster with when they are few
MAX_CLUSTER = 8  # blocks; backward also tries MAX_BLOCKS small ones
MAX_THREADS = 512 * MAX_CLUSTER  # per cluster; as in norm.cu
MAX_BLOCK_THREADS = {  # by vectors per thread; as in norm.cu
    "forward": {1: 512, 2: 512, 4: 256, 8: 512},
    "uneven": {1: 512, 2: 512, 4: 512, 8: 384},  # forward in rows that start anywhere
    "backward": {1: 512, 2: 512},
}
KERNELS = {"forward": "norm_fwd", "uneven": "norm_fwd_uneven", "backward": "norm_bwd"}
MIN_ROW = {"forward": 2048, "uneven": 1024, "backward": 256}  # elements: a shorter row has too little work
MIN_CLUSTER = {  # row lengths from which "cuda" beats "triton"
    (way, op): PerGPU(f"{op} {way} in clusters", lambda gpu, row=row: row)
    for way, row in MIN_ROW.items()
    for op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
}


def _cluster_choices(op: str, direction: str, size: int, vectors: int) -> list[Config]:
    """Return the splits of a row over blocks and vectors per thread, largest blocks last."""
    found, way = [], direction.removeprefix("cuda-")
    for per_thread, largest in MAX_BLOCK_THREADS[way].items():
        if per_thread == 8 and op.startswith("add_"):  # two tensors do not fit the registers
            continue
        if way != "backward" and per_thread == 1 and vectors > 512:  # too little work per thread
            continue
        most = MAX_BLOCKS if way == "backward" else MAX_CLUSTER
        sizes = [(n, vectors // (per_thread * n)) for n in (16, 8, 4, 2, 1) if n <= most]
        fits = [n for n, threads in sizes if (64 if n == 1 else 128) <= threads <= min(largest, MAX_THREADS // n)]
        found += [{"each": per_thread, "blocks": blocks} for blocks in fits]
    return found or [{"each": 1, "blocks": 1}]


def _cluster_default(op: str, direction: str, size: int, vectors: int) -> Config:
    """Return the split that wins on average.

    Forward: few blocks, with as many vectors per thread as registers hold. Backward: medium-sized blocks, which hide
    each other's latency.
    """
    few = 2048 if direction == "cuda-uneven" else 1024
    wanted = 2 if direction == "cuda-backward" or op.startswith("add_") or vectors < 256 else 4 if vectors <= few else 8

    def distance(config: Config) -> tuple[float, ...]:
        per_thread, blocks = config["each"], config["blocks"]
        apart = abs(math.log2(per_thread / wanted))
        if direction != "cuda-backward":
            return blocks, apart
        return apart + abs(math.log2(vectors / (per_thread * blocks) / 256)), blocks

    choices = _cluster_choices(op, direction, size, vectors)
    return min((config for config in choices if config["blocks"] <= MAX_CLUSTER), key=distance)


CLUSTER = ConfigTable("norm.json", _cluster_default, _cluster_choices)


def _max_vectors(direction: str) -> int:
    """Return how many vectors a block holds."""
    return max(per_thread * threads for per_thread, threads in MAX_BLOCK_THREADS[direction].items())


def clusters_win(op: str, direction: str, dtype: torch.dtype, device: int, M: int, N: int) -> bool:
    """Return whether clusters beat Triton programs on M rows of N elements.

    Few rows take as long as one does: forward then loses by the time in which a cluster starts.
    """
    if direction == "forward" and FEW_PROGRAMS[device] > M and N <= MAX_FEW:
        return False
    return MIN_CLUSTER[_way(direction, N, dtype.itemsize), op][device] <= N and has_clusters(device)


def cluster_plan(
    op: str, direction: str, dtype: torch.dtype, weights: torch.dtype, device: int, M: int, N: int, *numbers: float
) -> CudaLaunch | None:
    """Return a cluster launch, or None if clusters cannot hold such rows. All tensors must be aligned.

    The forward launch takes x, residual, weight, bias, y, sum and stats, with the numbers eps and offset; the backward
    one x, weight, stats, dy, dsum, dx and the partial sums of dw and db, one per cluster, with the number offset.
    """
    edges, vectors = _has_edges(N, dtype.itemsize), _vectors(N, dtype.itemsize)
    way = _way(direction, N, dtype.itemsize)
    if vectors > _max_vectors(way) * min(MAX_CLUSTER, max_cluster(device)):
        return None
    key = (op, f"cuda-{way}", dtype.itemsize, quarter_octave(vectors))
    single = [config for config in _cluster_choices(*key) if config["blocks"] == 1]
    if not has_clusters(device) and not single:
        return None
    config = CLUSTER(device, *key) if has_clusters(device) else single[-1]
    per_thread, blocks, is_rms = config["each"], config["blocks"], op.endswith("rms_norm")
    alone = [] if way == "forward" else [blocks == 1]
    flags = [is_rms, op.startswith("add_"), *alone, *([edges] if way == "backward" else [])]
    kinds = ("T" if weights == dtype else "float", per_thread, *("true" if flag else "false" for flag in flags))
    kernel = f"{KERNELS[way]}<T, {', '.join(map(str, kinds))}>"
    threads = WARP * cdiv(vectors, WARP * per_thread * blocks)
    if threads > MAX_BLOCK_THREADS[way][per_thread]:  # no split holds such a row
        return None
    reals = [*map(float, numbers)]
    if way == "forward":
        return CUDA.prepare(kernel, dtype, device, (M,), threads, N, *reals, cluster=blocks)
    parameters = 2 if way == "uneven" else 1
    shared = parameters * threads * per_thread * VECTOR * (weights.itemsize // dtype.itemsize)
    if shared > gpu_facts(device).shared_per_block:
        return None
    how = {"shared": shared, "cluster": blocks}
    clusters = min(M, max(1, CUDA.resident(kernel, dtype, device, threads, **how)))
    clusters = _balanced_clusters(M, clusters, VECTOR // dtype.itemsize if edges else 1)
    return CUDA.prepare(kernel, dtype, device, (clusters,), threads, M, N, *reals, **how)


def _balanced_clusters(rows: int, clusters: int, step: int) -> int:
    """Return the smallest number of clusters with the same number of rows in the busiest one.

    A cluster with several rows gets every n-th one, with n a multiple of `step`, so that all have the same shift.
    """
    if clusters >= rows:
        return rows
    clusters = clusters // step * step or step
    balanced = cdiv(cdiv(rows, cdiv(rows, clusters)), step) * step
    return min(rows, balanced)


def _way(direction: str, N: int, itemsize: int) -> str:
    """Return the direction, with a name of its own for forward in rows that start anywhere."""
    return "uneven" if direction == "forward" and _has_edges(N, itemsize) else direction


def _has_edges(N: int, itemsize: int) -> bool:
    """Return whether rows of N elements start and end inside a vector."""
    return N * itemsize % VECTOR != 0


def _vectors(N: int, itemsize: int) -> int:
    """Return how many vectors cover a row of N elements wherever it starts."""
    return cdiv(N * itemsize + (VECTOR - itemsize if _has_edges(N, itemsize) else 0), VECTOR)


def fits_cluster(x: Tensor) -> bool:
    """Return whether clusters hold the rows of x in either direction."""
    return 0 < _vectors(x.shape[-1], x.element_size()) <= _max_vectors("backward") * MAX_CLUSTER
