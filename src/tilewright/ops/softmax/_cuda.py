"""Softmax in CUDA C++: rows held by lanes, blocks or clusters (`softmax.cu`), and columns (`columns.cu`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from tilewright.runtime.clusters import (
    BLOCKS,
    MIN_CLUSTER_THREADS,
    VECTOR,
    WARP,
    Held,
    Rows,
    has_clusters,
    max_cluster,
    row_choices,
    row_default,
    row_launch,
)
from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.cuda import MAX_PORTABLE_CLUSTER, CudaLaunch, CudaSource
from tilewright.runtime.sizes import cdiv

HELD = {"fwd": Held(1), "bwd": Held(2)}
ACROSS = (1, 2, 4, 8, 16, 32)  # threads that take neighboring packs
MAX_COLUMN_THREADS = 512  # per block; as in columns.cu
MAX_COLUMN_BYTES = 256  # per thread and column
SHORT_ROW, SHORT_TILE = 512, 8192  # bytes of a row that starts anywhere, and of those that a block takes
SHORT_EACH = 8  # elements of such a row that a thread takes
ROW_CUDA = CudaSource(  # a few of the many instances, compiled in the tests
    "softmax/softmax.cu",
    "softmax_fwd<T, 8, 0, false, false>",
    "softmax_fwd<T, 4, 32, true, true>",
    "softmax_bwd<T, 4, 0, true, false>",
    "softmax_bwd<T, 2, 8, false, true>",
    "softmax_short_fwd<T, 5, 8, false>",
    "softmax_short_bwd<T, 8, 32, true>",
)
COLUMN_CUDA = CudaSource(
    "softmax/columns.cu",
    "softmax_columns_fwd<T, 4, 8, false, false>",
    "softmax_columns_fwd<T, 1, 8, true, true>",
    "softmax_columns_bwd<T, 2, 8, false>",
)
ROWS = ConfigTable(
    "softmax.json",
    lambda kernel, itemsize, vectors, *most: row_default(HELD[kernel[-3:]], vectors, *most),
    lambda kernel, itemsize, vectors: row_choices(HELD[kernel[-3:]], vectors),
)


class View(NamedTuple):
    """A tensor as [outers, N, inners] in memory, whose dimension of N elements is reduced.

    Of rows, `inners` is 1 and `stride_n` too. `is_transposed`: neighbors in memory are neighbors in the last dimension
    but one, and the result is [outers, inners, N].
    """

    outers: int
    N: int
    inners: int
    stride_o: int
    stride_n: int
    is_transposed: bool = False


def view(shape: Sequence[int], strides: Sequence[int], dim: int) -> View | None:
    """Return the view of a tensor with these strides; None if there is none."""
    sizes = [*zip(shape, strides, strict=True)]
    before, (N, stride_n), after = _merged(sizes[:dim]), sizes[dim], _merged(sizes[dim + 1 :])
    if after != (1, 1):
        return View(before[0], N, after[0], before[1], stride_n) if before and after and after[1] == 1 else None
    if stride_n == 1 or N == 1:
        return View(before[0], N, 1, before[1], 1) if before else None
    for n in range(dim):
        before, inner = _merged(sizes[:n]), _merged(sizes[n:dim])
        if before and inner and inner[0] > 1 == inner[1]:
            return View(before[0], N, inner[0], before[1], stride_n, is_transposed=True)
    return None


def _merged(sizes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the size and stride of one dimension that is as good as these; None if there is none."""
    merged = (1, 1)
    for size, stride in reversed([one for one in sizes if one[0] != 1]):
        if merged[0] == 1:
            merged = size, stride
        elif stride == merged[0] * merged[1]:
            merged = size * merged[0], merged[1]
        else:
            return None
    return merged


def _short_plan(direction: str, rows: Rows, log: bool) -> CudaLaunch:
    """Return the launch of short rows that start anywhere."""
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if cdiv(rows.N, n) <= SHORT_EACH or n == WARP)
    name = f"softmax_short_{direction}<T, {cdiv(rows.N, lanes)}, {lanes}, {_cpp(log)}>"
    vector, size = VECTOR // rows.itemsize, rows.N * rows.itemsize
    together = cdiv(SHORT_TILE // size, vector) * vector  # a multiple of whole vectors
    shared = HELD[direction].tensors * together * size
    grid, numbers = (cdiv(rows.M, together),), (rows.M, rows.N, together)
    return ROW_CUDA.prepare(name, rows.dtype, rows.device, grid, 4 * WARP, *numbers, shared=shared)


def row_plan(direction: str, rows: Rows, stride: int, is_aligned: bool, log: bool) -> CudaLaunch:
    """Return the launch of x and y, whose rows are `stride` elements apart in x, or of y, dy and dx."""
    if rows.has_edges and rows.N * rows.itemsize <= SHORT_ROW and is_aligned and stride == rows.N:
        return _short_plan(direction, rows, log)
    is_shifted = not is_aligned or (stride - rows.N) * rows.itemsize % VECTOR != 0
    how = row_launch(ROWS, f"softmax_{direction}", rows, HELD[direction])
    name = f"softmax_{direction}<T, {how.each}, {how.lanes}, {_cpp(is_shifted)}, {_cpp(log)}>"
    numbers = (rows.M, rows.N, *([stride] if direction == "fwd" else []), *how.numbers)
    return ROW_CUDA.prepare(name, rows.dtype, rows.device, how.grid, how.threads, *numbers, cluster=how.blocks)


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


def _column_threads(N: int, across: int, vectors: int, blocks: int) -> int:
    """Return the threads of a block, whole warps."""
    return cdiv(cdiv(N, vectors * blocks) * across, max(WARP, across)) * max(WARP, across)


def _column_choices(kernel: str, itemsize: int, most: int, N: int) -> list[Config]:
    """Return the splits of columns, of which `most` neighbors can be accessed together."""
    found = []
    for pack, across, vectors, blocks in product({most, max(1, most // 2)}, ACROSS, (4, 8, 16), BLOCKS):
        threads = _column_threads(N, across, vectors, blocks)
        if (
            32 <= across * pack * itemsize <= 256
            and vectors * pack * itemsize * HELD[kernel[-3:]].tensors <= MAX_COLUMN_BYTES
            and threads <= MAX_COLUMN_THREADS
            and (blocks == 1 or threads >= MIN_CLUSTER_THREADS)
            and not (kernel.startswith("transposed") and vectors % (VECTOR // itemsize))
        ):
            found.append({"pack": pack, "across": across, "vectors": vectors, "blocks": blocks})
    return found


def _best_columns(choices: list[Config], kernel: str, itemsize: int, most: int, N: int) -> Config:
    """Return the choice with few idle threads, many values per thread, and the fewest blocks of about 256 threads."""

    def cost(config: Config) -> tuple[float, ...]:
        across, vectors, blocks = config["across"], config["vectors"], config["blocks"]
        threads, width = _column_threads(N, across, vectors, blocks), across * config["pack"] * itemsize
        idle = threads // across * vectors * blocks / N
        return most - config["pack"], idle > 1.3, max(0, 64 - width), -vectors, abs(threads - 256), width

    return min(choices, key=cost)


def _column_default(*key: Any) -> Config:
    choices = _column_choices(*key)
    return _best_columns([c for c in choices if c["blocks"] <= MAX_PORTABLE_CLUSTER] or choices, *key)


COLUMNS = ConfigTable("softmax.json", _column_default, _column_choices)


def column_plan(
    direction: str, of: View, dtype: torch.dtype, device: int, alignment: int, log: bool
) -> CudaLaunch | None:
    """Return the launch of x and y, or of y, dy and dx; None if no cluster holds the columns."""
    itemsize, strides = dtype.itemsize, (of.stride_o if of.outers > 1 else 0, of.stride_n)
    strides = strides if direction == "fwd" else ()
    bytes_together = math.gcd(alignment, VECTOR, *(n * itemsize for n in (of.inners, *strides)))
    most = bytes_together // itemsize
    kernel = f"{'transposed' if of.is_transposed else 'columns'}_{direction}"
    key = kernel, itemsize, most, of.N
    fits = [config for config in _column_choices(*key) if config["blocks"] <= max_cluster(device)]
    if not fits:
        return None
    config = COLUMNS(device, *key) if has_clusters(device) else _best_columns(fits, *key)
    pack, across, vectors, blocks = config["pack"], config["across"], config["vectors"], config["blocks"]
    threads = _column_threads(of.N, across, vectors, blocks)
    groups = threads // max(across, WARP)
    shared = (groups + (blocks if blocks > 1 else 0)) * across * pack * 8
    if of.is_transposed:
        unit = VECTOR // itemsize
        pitch = threads // across * vectors + unit * max(1, 8 // across)
        shared = max(shared, across * pack * pitch * itemsize)
    flags = [of.is_transposed, log] if direction == "fwd" else [log]
    kinds = ", ".join(("T", str(pack), str(vectors), *map(_cpp, flags)))
    numbers = (of.outers, of.N, of.inners, *strides, across)
    grid = (cdiv(of.outers * of.inners // pack, across),)
    name = f"softmax_columns_{direction}<{kinds}>"
    return COLUMN_CUDA.prepare(name, dtype, device, grid, threads, *numbers, shared=shared, cluster=blocks)
