"""Softmax and log_softmax: launch plans, the differentiable operators, and the call path.

A row of up to MAX_TILE elements is one tile in registers. A longer one is held by a thread block cluster (CUDA C++)
where the GPU has clusters, and read twice elsewhere. A dimension that is not the last is reduced in columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.softmax._triton import (
    _columns_bwd,
    _columns_fwd,
    _online_fwd,
    _tile_bwd,
    _tile_fwd,
    _two_pass_bwd,
)
from tilewright.runtime.clusters import (
    MAX_BLOCKS,
    VECTOR,
    VECTORS_PER_THREAD,
    Rows,
    cluster_choices,
    cluster_default,
    cluster_launch,
    max_vectors_per_block,
)
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.eligibility import Dispatch, TensorKey, eligible, has_elements, unary
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv, next_power_of_2

MAX_TILE = 32768  # elements of a row that one program holds in registers; twice as many spill
MIN_CLUSTER = 8193  # elements of a row from which on a cluster is faster, where there are clusters
MAX_COLUMN_TILE = 16384  # elements of the columns that one program holds
TWO_PASS = {"BLOCK_N": 16384, "num_warps": 16}  # backward of rows that are read twice
TENSORS = {"fwd": 1, "bwd": 2}  # whose rows a cluster holds

Launch = Callable[..., None]  # takes the tensors


class Softmax(NamedTuple):
    """The options of a call."""

    dim: int
    log: bool = False
    form: str = "best"  # tile, online, cluster, or the fastest of them


def _tile_default(direction: str, itemsize: int, block: int) -> Config:
    if direction == "bwd" and block == MAX_TILE:  # two tensors do not quite fit the registers
        return TWO_PASS
    rows = max(1, 2048 // block)  # several short rows share a program
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": min(32, max(4, rows * block // 512))}


def _tile_choices(direction: str, itemsize: int, block: int) -> list[Config]:
    found = {}
    for tile in (1024, 2048, 4096, 8192):
        rows = max(1, tile // block)
        for per_thread in (8, 16, 32):
            warps = min(32, max(1, rows * block // (32 * per_thread)))
            found[rows, warps] = {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}
    return list(found.values())


TILE = ConfigTable("softmax.json", _tile_default, _tile_choices)
CLUSTER = ConfigTable(
    "softmax.json",
    lambda kernel, itemsize, vectors: cluster_default(TENSORS[kernel[-3:]], vectors),
    lambda kernel, itemsize, vectors: cluster_choices(TENSORS[kernel[-3:]], vectors),
)
CUDA = CudaSource(
    "softmax/softmax.cu",
    *(
        f"softmax_{direction}<T, {VECTORS_PER_THREAD[n]}, {log}>"
        for direction, n in TENSORS.items()
        for log in ("false", "true")
    ),
)

_tile_forward = Launcher(_tile_fwd)
_online_forward = Launcher(_online_fwd)
_columns_forward = Launcher(_columns_fwd)
_tile_backward = Launcher(_tile_bwd)
_two_pass_backward = Launcher(_two_pass_bwd)
_columns_backward = Launcher(_columns_bwd)


def _tile(rows: Rows, log: bool) -> Launch:
    config = TILE(rows.device, "fwd", rows.itemsize, rows.block)
    return _tile_forward.prepare((cdiv(rows.M, config["BLOCK_M"]),), rows.M, rows.N, LOG=log, **config)


def _online(rows: Rows, log: bool) -> Launch:
    block = min(4096 if rows.N <= 8192 else 8192, rows.block)
    return _online_forward.prepare((rows.M,), rows.N, LOG=log, BLOCK_N=block, num_warps=8)


def _cluster(direction: str, rows: Rows, log: bool) -> Launch:
    return cluster_launch(CLUSTER, CUDA, f"softmax_{direction}", rows, TENSORS[direction], (log,), rows.N)


def _cluster_or_online(rows: Rows, log: bool) -> Launch:
    return _cluster("fwd", rows, log) if rows.fit_cluster(TENSORS["fwd"]) else _online(rows, log)


def _best(rows: Rows, log: bool) -> Launch:
    is_long = rows.N > MAX_TILE or (rows.N >= MIN_CLUSTER and rows.fit_cluster(TENSORS["fwd"]))
    return _cluster_or_online(rows, log) if is_long else _tile(rows, log)


FORMS = {"tile": _tile, "online": _online, "cluster": _cluster_or_online, "best": _best}


def _columns_config(N: int, inner: int) -> Config:
    width = min(64, next_power_of_2(inner))
    block = min(next_power_of_2(N), MAX_COLUMN_TILE // width)
    return {"BLOCK_N": block, "BLOCK_I": width, "num_warps": min(32, max(4, block * width // 512))}


def _split(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return the number of elements before, along and after a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


@cached_plan
def _plan_forward(
    options: Softmax, shape: tuple[int, ...], dtype: torch.dtype, device: int, is_aligned: bool
) -> Launch:
    """Return the launch that takes x and y."""
    outer, N, inner = _split(shape, options.dim)
    if inner == 1:
        return FORMS[options.form](Rows(outer, N, dtype, device, is_aligned), options.log)
    config = _columns_config(N, inner)
    tiles = cdiv(inner, config["BLOCK_I"])
    one_tile = config["BLOCK_N"] >= N
    return _columns_forward.prepare((outer * tiles,), N, inner, tiles, LOG=options.log, ONE_TILE=one_tile, **config)


@cached_plan
def _plan_backward(
    options: Softmax, scale: float, shape: tuple[int, ...], dtype: torch.dtype, device: int, is_aligned: bool
) -> Launch:
    """Return the launch that takes y, dy and dx."""
    outer, N, inner = _split(shape, options.dim)
    if inner > 1:
        config = _columns_config(N, inner)
        tiles = cdiv(inner, config["BLOCK_I"])
        return _columns_backward.prepare((outer * tiles,), N, inner, tiles, LOG=options.log, **config)
    rows = Rows(outer, N, dtype, device, is_aligned)
    flags = {"LOG": options.log, "MASKED": options.form == "masked"}
    fits = options.form in ("best", "cluster") and scale == 1.0 and rows.fit_cluster(TENSORS["bwd"])
    if fits and (options.form == "cluster" or N >= MIN_CLUSTER):
        return _cluster("bwd", rows, options.log)
    config = TILE(device, "bwd", rows.itemsize, rows.block) if N <= MAX_TILE else TWO_PASS
    if config["BLOCK_N"] >= N:
        return _tile_backward.prepare((cdiv(outer, config["BLOCK_M"]),), outer, N, scale, **flags, **config)
    return _two_pass_backward.prepare((outer,), N, scale, **flags, **config)


@operator("softmax", fake=contiguous_like)
def softmax_forward(x: Tensor, options: Softmax) -> Tensor:
    """Softmax over a dimension, or its logarithm."""
    y = contiguous_like(x)
    if x.numel():
        x = x.contiguous()
        is_aligned = x.data_ptr() % VECTOR == 0
        _plan_forward(options, x.shape, x.dtype, x.get_device(), is_aligned)(x, y)
    return y


class SoftmaxBackward(NamedTuple):
    """The options of the gradient: it is multiplied by `scale`; form "masked" gives zero outputs a zero gradient."""

    dim: int
    log: bool = False
    form: str = "best"
    scale: float = 1.0


@operator("softmax_backward", fake=contiguous_like)
def softmax_backward(y: Tensor, dy: Tensor, options: SoftmaxBackward) -> Tensor:
    """The gradient of the input from the output and its gradient."""
    dx = contiguous_like(y)
    if y.numel():
        y, dy = y.contiguous(), dy.contiguous()
        is_aligned = (y.data_ptr() | dy.data_ptr()) % VECTOR == 0
        forward = Softmax(*options[:3])
        _plan_backward(forward, options.scale, y.shape, y.dtype, y.get_device(), is_aligned)(y, dy, dx)
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        return gradient_formula(y, dy, ctx.options)
    return softmax_backward(y, dy, SoftmaxBackward(*ctx.options))


def gradient_formula(y: Tensor, dy: Tensor, options: Softmax) -> Tensor:
    """The gradient of the input in torch operations."""
    if options.log:
        return dy - y.exp() * dy.sum(options.dim, keepdim=True)
    return y * (dy - (y * dy).sum(options.dim, keepdim=True))


softmax_forward.differentiate(_save, _backward)


def fits_cluster(x: Tensor) -> bool:
    """Return whether the largest clusters hold a row."""
    return Rows(1, x.shape[-1], x.dtype, -1, True).vectors <= max_vectors_per_block(TENSORS["fwd"]) * MAX_BLOCKS


@cached_plan
def _plan_call(args: tuple[int, bool], x: TensorKey) -> Callable[[Tensor], Tensor] | None:
    options, (shape, dtype, device) = Softmax(*args), x
    if not has_elements(shape, dtype, options.dim):
        return None
    return unary(_plan_forward(options, shape, dtype, device, True), shape)


def _call(args: tuple[int, bool], x: Tensor) -> Tensor | None:
    options = Softmax(*args)
    return softmax_forward(x, options) if -x.dim() <= options.dim < x.dim() and eligible(x) else None


dispatch = Dispatch(_plan_call, _call)
