"""Softmax and log_softmax: launch plans, the differentiable operators, and the call path.

A row is read once. Rows that fill a tile of a power of two are Triton's. Others, and long ones, are held by lanes,
blocks or clusters (CUDA C++), which take rows of any alignment and distance. Without CUDA C++ a row of up to MAX_TILE
elements is a partially filled tile, and a longer one is read twice. A dimension that is not the last is reduced in
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.softmax._cuda import HELD, View, column_plan, row_plan, view
from tilewright.ops.softmax._triton import (
    _columns_bwd,
    _columns_fwd,
    _online_fwd,
    _tile_bwd,
    _tile_fwd,
    _two_pass_bwd,
)
from tilewright.runtime.clusters import MAX_BLOCKS, MAX_THREADS, VECTOR, Rows
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.eligibility import ALIGNMENT, Dispatch, TensorKey, eligible, has_elements, unary
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv, next_power_of_2, vector_hint

MAX_TILE = 32768  # elements of a row that one program holds in registers; twice as many spill
# Row length from which a cluster is faster, where there are clusters.
MIN_CLUSTER = PerGPU("softmax in clusters", lambda gpu: MAX_TILE // 4 + 1)
MAX_COLUMN_TILE = 16384  # elements of the columns that one program holds
TWO_PASS = {"BLOCK_N": 16384, "num_warps": 16}  # backward of rows that are read twice

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
_tile_forward = Launcher(_tile_fwd)
_online_forward = Launcher(_online_fwd)
_columns_forward = Launcher(_columns_fwd)
_tile_backward = Launcher(_tile_bwd)
_two_pass_backward = Launcher(_two_pass_bwd)
_columns_backward = Launcher(_columns_bwd)


def _tile(rows: Rows, log: bool) -> Launch:
    config = TILE(rows.device, "fwd", rows.itemsize, rows.block)
    grid = (cdiv(rows.M, config["BLOCK_M"]),)
    return _tile_forward.prepare(grid, rows.M, rows.N, LOG=log, VECTOR=vector_hint(rows.N), **config)


def _online(rows: Rows, log: bool) -> Launch:
    block = min(4096 if rows.N <= 8192 else 8192, rows.block)
    return _online_forward.prepare((rows.M,), rows.N, LOG=log, BLOCK_N=block, num_warps=8)


def _cluster(rows: Rows, log: bool) -> Launch:
    return row_plan("fwd", rows, rows.N, True, log) if rows.fit_cluster(HELD["fwd"]) else _online(rows, log)


def _best(rows: Rows, log: bool) -> Launch:
    if rows.fit_cluster(HELD["fwd"]) and (rows.block != rows.N or MIN_CLUSTER[rows.device] <= rows.N):
        return _cluster(rows, log)
    return _tile(rows, log) if rows.N <= MAX_TILE else _online(rows, log)


FORMS = {"tile": _tile, "online": _online, "cluster": _cluster, "best": _best}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def alignment(*tensors: Tensor) -> int:
    """Return the bytes that all addresses are multiples of, at most those of a vector."""
    return math.gcd(VECTOR, *(tensor.data_ptr() for tensor in tensors))


def _columns_config(N: int, inner: int) -> Config:
    width = min(64, next_power_of_2(inner))
    block = min(next_power_of_2(N), MAX_COLUMN_TILE // width)
    return {"BLOCK_N": block, "BLOCK_I": width, "num_warps": min(32, max(4, block * width // 512))}


@cached_plan
def _plan_forward(
    options: Softmax,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: int,
    alignment: int,
) -> Launch | None:
    """Return the launch that takes x and y; None if x must be made contiguous. No strides: it is.

    `alignment` is that of the address of x, in bytes.
    """
    x = view(shape, strides or contiguous_strides(shape), options.dim % len(shape))
    if x is None:
        return None
    if x.inners > 1:
        launch = column_plan("fwd", x, dtype, device, alignment, options.log)
        return launch or (_columns(x, device, options.log) if strides is None else None)
    rows = Rows(x.outers, x.N, dtype, device)
    if strides is None and alignment % VECTOR == 0:
        return FORMS[options.form](rows, options.log)
    if rows.fit_cluster(HELD["fwd"]):
        return row_plan("fwd", rows, x.stride_o, alignment % VECTOR == 0, options.log)
    return FORMS[options.form](rows, options.log) if strides is None else None


def _columns(x: View, device: int, log: bool) -> Launch:
    config = _columns_config(x.N, x.inners)
    tiles = cdiv(x.inners, config["BLOCK_I"])
    one_tile = config["BLOCK_N"] >= x.N
    return _columns_forward.prepare((x.outers * tiles,), x.N, x.inners, tiles, LOG=log, ONE_TILE=one_tile, **config)


@cached_plan
def _plan_backward(
    options: Softmax, scale: float, shape: tuple[int, ...], dtype: torch.dtype, device: int, alignment: int
) -> Launch:
    """Return the launch that takes y, dy and dx, which are contiguous."""
    y = view(shape, contiguous_strides(shape), options.dim % len(shape))
    assert y is not None
    if y.inners > 1:
        if launch := column_plan("bwd", y, dtype, device, alignment, options.log):
            return launch
        config = _columns_config(y.N, y.inners)
        tiles = cdiv(y.inners, config["BLOCK_I"])
        return _columns_backward.prepare((y.outers * tiles,), y.N, y.inners, tiles, LOG=options.log, **config)
    rows, N = Rows(y.outers, y.N, dtype, device), y.N
    flags = {"LOG": options.log, "MASKED": options.form == "masked", "VECTOR": vector_hint(N)}
    if options.form in ("best", "cluster") and scale == 1.0 and rows.fit_cluster(HELD["bwd"]):
        is_even = rows.block == N and MIN_CLUSTER[device] > N and alignment % VECTOR == 0
        if options.form == "cluster" or not is_even:
            return row_plan("bwd", rows, N, alignment % VECTOR == 0, options.log)
    config = TILE(device, "bwd", rows.itemsize, rows.block) if N <= MAX_TILE else TWO_PASS
    if config["BLOCK_N"] >= N:
        return _tile_backward.prepare((cdiv(rows.M, config["BLOCK_M"]),), rows.M, N, scale, **flags, **config)
    del flags["VECTOR"]
    return _two_pass_backward.prepare((rows.M,), N, scale, **flags, **config)


@operator("softmax", fake=contiguous_like)
def softmax_forward(x: Tensor, options: Softmax) -> Tensor:
    """Softmax over a dimension, or its logarithm."""
    y = contiguous_like(x)
    if x.numel():
        strides = None if x.is_contiguous() else x.stride()
        launch = _plan_forward(options, x.shape, strides, x.dtype, x.get_device(), alignment(x))
        if launch is None:
            x = x.contiguous()
            launch = _plan_forward(options, x.shape, None, x.dtype, x.get_device(), alignment(x))
        launch(x, y)
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
        forward = Softmax(*options[:3])
        _plan_backward(forward, options.scale, y.shape, y.dtype, y.get_device(), alignment(y, dy))(y, dy, dx)
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
    return Rows(1, x.shape[-1], x.dtype, -1).vectors <= HELD["fwd"].vectors * MAX_THREADS * MAX_BLOCKS


@cached_plan
def _plan_call(args: tuple[int, bool], x: TensorKey) -> Callable[[Tensor], Tensor] | None:
    options, (shape, dtype, device) = Softmax(*args), x
    if not has_elements(shape, dtype, options.dim):
        return None
    return unary(_plan_forward(options, shape, None, dtype, device, ALIGNMENT), shape)


def _call(args: tuple[int, bool], x: Tensor) -> Tensor | None:
    options = Softmax(*args)
    return softmax_forward(x, options) if -x.dim() <= options.dim < x.dim() and eligible(x) else None


dispatch = Dispatch(_plan_call, _call)
