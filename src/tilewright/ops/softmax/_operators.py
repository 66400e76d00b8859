"""What softmax and its kin share: kernels over rows and over columns, and which of them a row takes.

A row that fits into the registers of one program takes the tile form. A longer one is held by a cluster of blocks (CUDA
C++), where the GPU has clusters; elsewhere it is read twice. A dimension that is not the last is reduced in columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._exp import exp
from tilewright.runtime.clusters import (
    MOST_BLOCKS,
    PACK,
    PACKS,
    Rows,
    cluster_choices,
    cluster_default,
    clusters,
    most_packs,
)
from tilewright.runtime.configs import Config, Tuned, planned
from tilewright.runtime.cuda import Source
from tilewright.runtime.eligibility import filling, has_at_least, has_elements, is_quiet, is_ready, runs_here
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv, next_power_of_2

LONGEST_TILE = 32768  # elements of a row that one program can hold in registers; twice as many spill
SHORTEST_CLUSTER = 8193  # elements of a row from which a cluster is faster, where there are any
COLUMN_TILE = 16384  # elements of columns that one program can hold


@triton.jit
def _softmax_of(x, m, total, LOG: tl.constexpr):
    if LOG:
        return x - m - tl.log(total)
    else:
        return exp(x - m) * (1.0 / total)


@triton.jit
def _gradient_term(y, dy, LOG: tl.constexpr):
    """What the gradient needs the sum of."""
    if LOG:
        return dy
    else:
        return y * dy


@triton.jit
def _gradient(y, dy, total, LOG: tl.constexpr, HIDES: tl.constexpr = False):
    """If it HIDES, an output of zero has none, whatever the others are."""
    if LOG:
        return dy - exp(y) * total
    elif HIDES:
        return tl.where(y == 0.0, 0.0, y * (dy - total))
    else:
        return y * (dy - total)


@triton.jit
def _tile_fwd(x_ptr, y_ptr, M, N, LOG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may pass 2**31
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    m = tl.max(x, axis=1)[:, None]
    total = tl.sum(exp(x - m), axis=1)[:, None]
    tl.store(y_ptr + offs, _softmax_of(x, m, total, LOG).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _online_fwd(x_ptr, y_ptr, N, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    y_ptr += row * N
    # One running maximum. The sums are rescaled when it grows: a second exp for each block, not for each element.
    m = -float("inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        grown = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(grown == -float("inf"), 0.0, grown)  # only -inf so far: no NaN from -inf + inf
        total = total * exp(m - shift) + exp(x - shift)
        m = grown
    total_sum = tl.sum(total, axis=0)
    # Last element first: the end of the row is what the first pass left in the cache.
    for start in range(0, N, BLOCK_N):
        offs_n = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N - start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        y = _softmax_of(x, m, total_sum, LOG)
        tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _columns_fwd(
    x_ptr, y_ptr, N, inner, tiles, LOG: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    start = program // tiles * N * inner
    offs_i = program % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    x_ptr += start + offs_i[None, :]
    y_ptr += start + offs_i[None, :]
    is_inside = (offs_i < inner)[None, :]
    if WHOLE:
        mask = (offs_n < N)[:, None] & is_inside
        x = tl.load(x_ptr + offs_n[:, None] * inner, mask=mask, other=-float("inf")).to(tl.float32)
        m = tl.max(x, axis=0)[None, :]
        total = tl.sum(exp(x - m), axis=0)[None, :]
        y = _softmax_of(x, m, total, LOG)
        tl.store(y_ptr + offs_n[:, None] * inner, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        m = tl.full([BLOCK_I], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_I], tl.float32)
        for first in range(0, N, BLOCK_N):
            offs = (first + offs_n)[:, None] * inner
            mask = (first + offs_n < N)[:, None] & is_inside
            x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
            grown = tl.maximum(m, tl.max(x, axis=0))
            shift = tl.where(grown == -float("inf"), 0.0, grown)
            total = total * exp(m - shift) + tl.sum(exp(x - shift[None, :]), axis=0)
            m = grown
        for first in range(0, N, BLOCK_N):
            offs = (first + offs_n)[:, None] * inner
            mask = (first + offs_n < N)[:, None] & is_inside
            x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
            y = _softmax_of(x, m[None, :], total[None, :], LOG)
            tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_bwd(
    y_ptr, dy_ptr, dx_ptr, M, N, scale,
    LOG: tl.constexpr, HIDES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    y = tl.load(y_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total = tl.sum(_gradient_term(y, dy, LOG), axis=1)[:, None]
    tl.store(dx_ptr + offs, (_gradient(y, dy, total, LOG, HIDES) * scale).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _twice_bwd(y_ptr, dy_ptr, dx_ptr, N, scale, LOG: tl.constexpr, HIDES: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * N
    dy_ptr += row * N
    dx_ptr += row * N
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + offs_n, mask=offs_n < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += _gradient_term(y, tl.load(dy_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32), LOG)
    inner = tl.sum(total, axis=0)
    for start in range(0, N, BLOCK_N):
        offs_n = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N - start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        dx = _gradient(y, dy, inner, LOG, HIDES) * scale
        tl.store(dx_ptr + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _columns_bwd(
    y_ptr, dy_ptr, dx_ptr, N, inner, tiles, LOG: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    offs_i = program % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    base = program // tiles * N * inner + offs_i[None, :]
    is_inside = (offs_i < inner)[None, :]
    total = tl.zeros([BLOCK_I], tl.float32)
    for first in range(0, N, BLOCK_N):
        offs = base + (first + offs_n)[:, None] * inner
        mask = (first + offs_n < N)[:, None] & is_inside
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(_gradient_term(y, dy, LOG), axis=0)
    for first in range(0, N, BLOCK_N):
        offs = base + (first + offs_n)[:, None] * inner
        mask = (first + offs_n < N)[:, None] & is_inside
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, _gradient(y, dy, total[None, :], LOG).to(dx_ptr.dtype.element_ty), mask=mask)


TWICE = {"BLOCK_N": 16384, "num_warps": 16}  # backward in blocks of a row, read twice


def _tile_default(direction: str, size: int, block: int) -> Config:
    if direction == "bwd" and block == LONGEST_TILE:  # two tensors do not quite fit the registers
        return TWICE
    rows = max(1, 2048 // block)  # of short rows several share a program
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": min(32, max(4, rows * block // 512))}


def _tile_choices(direction: str, size: int, block: int) -> list[Config]:
    found = {}
    for tile in (1024, 2048, 4096, 8192):
        rows = max(1, tile // block)
        for each in (8, 16, 32):  # elements a thread
            warps = min(32, max(1, rows * block // (32 * each)))
            found[rows, warps] = {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}
    return list(found.values())


TILE = Tuned("softmax.json", _tile_default, _tile_choices)

TENSORS = {"fwd": 1, "bwd": 2}  # whose rows are held
CUDA = Source(
    "softmax/softmax.cu",
    *(f"softmax_{way}<T, {PACKS[n]}, {log}>" for way, n in TENSORS.items() for log in ("false", "true")),
)


def _cluster_default(kernel: str, size: int, packs: int) -> Config:
    return cluster_default(TENSORS[kernel[-3:]], packs)


def _cluster_choices(kernel: str, size: int, packs: int) -> list[Config]:
    return cluster_choices(TENSORS[kernel[-3:]], packs)


CLUSTER = Tuned("softmax.json", _cluster_default, _cluster_choices)
Launch = Callable[..., None]  # of the tensors


def _cluster(way: str, rows: Rows, log: bool) -> Launch:
    return clusters(CLUSTER, CUDA, f"softmax_{way}", rows, TENSORS[way], (log,), rows.N)


_tile_forward = Launcher(_tile_fwd)
_online_forward = Launcher(_online_fwd)
_columns_forward = Launcher(_columns_fwd)
_tile_backward = Launcher(_tile_bwd)
_twice_backward = Launcher(_twice_bwd)
_columns_backward = Launcher(_columns_bwd)


def _tile(rows: Rows, log: bool) -> Launch:
    config = TILE(rows.device, "fwd", rows.size, rows.block)
    return _tile_forward.prepare((cdiv(rows.M, config["BLOCK_M"]),), rows.M, rows.N, LOG=log, **config)


def _online(rows: Rows, log: bool) -> Launch:
    block = min(4096 if rows.N <= 8192 else 8192, rows.block)
    return _online_forward.prepare((rows.M,), rows.N, LOG=log, BLOCK_N=block, num_warps=8)


def _long(rows: Rows, log: bool) -> Launch:
    return _cluster("fwd", rows, log) if rows.fit_a_cluster(TENSORS["fwd"]) else _online(rows, log)


def _best(rows: Rows, log: bool) -> Launch:
    is_long = rows.N > LONGEST_TILE or (rows.N >= SHORTEST_CLUSTER and rows.fit_a_cluster(TENSORS["fwd"]))
    return _long(rows, log) if is_long else _tile(rows, log)


def _columns_config(N: int, inner: int) -> Config:
    width = min(64, next_power_of_2(inner))
    block = min(next_power_of_2(N), COLUMN_TILE // width)
    return {"BLOCK_N": block, "BLOCK_I": width, "num_warps": min(32, max(4, block * width // 512))}


FORMS = {"tile": _tile, "online": _online, "cluster": _long, "best": _best}


def _split(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """The sizes before, of and after a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


@planned
def _plan_forward(
    shape: tuple[int, ...], dtype: torch.dtype, device: int, is_aligned: bool, dim: int, log: bool, form: str
) -> Launch:
    """How x becomes y."""
    outer, N, inner = _split(shape, dim)
    if inner == 1:
        return FORMS[form](Rows(outer, N, dtype, device, is_aligned), log)
    config = _columns_config(N, inner)
    tiles = cdiv(inner, config["BLOCK_I"])
    whole = config["BLOCK_N"] >= N
    return _columns_forward.prepare((outer * tiles,), N, inner, tiles, LOG=log, WHOLE=whole, **config)


@planned
def _plan_backward(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    is_aligned: bool,
    dim: int,
    log: bool,
    scale: float,
    form: str,
) -> Launch:
    """How y and its gradient become that of x."""
    outer, N, inner = _split(shape, dim)
    if inner > 1:
        config = _columns_config(N, inner)
        tiles = cdiv(inner, config["BLOCK_I"])
        return _columns_backward.prepare((outer * tiles,), N, inner, tiles, LOG=log, **config)
    rows = Rows(outer, N, dtype, device, is_aligned)
    flags = {"LOG": log, "HIDES": form == "masked"}
    fits = form in ("best", "cluster") and scale == 1.0 and rows.fit_a_cluster(TENSORS["bwd"])
    if fits and (form == "cluster" or N >= SHORTEST_CLUSTER):
        return _cluster("bwd", rows, log)
    config = TILE(device, "bwd", rows.size, rows.block) if N <= LONGEST_TILE else TWICE
    if config["BLOCK_N"] >= N:
        return _tile_backward.prepare((cdiv(outer, config["BLOCK_M"]),), outer, N, scale, **flags, **config)
    return _twice_backward.prepare((outer,), N, scale, **flags, **config)


@operator("softmax", fake=contiguous_like)
def softmax_forward(x: Tensor, dim: int, log: bool, form: str) -> Tensor:
    """Softmax over a dimension, or its logarithm, by the named form."""
    y = contiguous_like(x)
    if x.numel():
        x = x.contiguous()
        is_aligned = x.data_ptr() % PACK == 0
        _plan_forward(x.shape, x.dtype, x.get_device(), is_aligned, dim, log, form)(x, y)
    return y


@operator("softmax_backward", fake=contiguous_like)
def softmax_backward(y: Tensor, dy: Tensor, dim: int, log: bool, scale: float, form: str) -> Tensor:
    """The gradient of the input, times a factor, from the output and its gradient; form "masked" hides zeros."""
    dx = contiguous_like(y)
    if y.numel():
        y, dy = y.contiguous(), dy.contiguous()
        is_aligned = (y.data_ptr() | dy.data_ptr()) % PACK == 0
        _plan_backward(y.shape, y.dtype, y.get_device(), is_aligned, dim, log, scale, form)(y, dy, dx)
    return dx


def _save(ctx, inputs, output) -> None:
    _, ctx.dim, ctx.log, ctx.form = inputs
    ctx.save_for_backward(output)


def _backward(ctx, dy: Tensor):
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        return gradient_formula(y, dy, ctx.dim, ctx.log), None, None, None
    return softmax_backward(y, dy, ctx.dim, ctx.log, 1.0, ctx.form), None, None, None


def gradient_formula(y: Tensor, dy: Tensor, dim: int, log: bool) -> Tensor:
    if log:
        return dy - y.exp() * dy.sum(dim, keepdim=True)
    return y * (dy - (y * dy).sum(dim, keepdim=True))


softmax_forward.differentiate(_save, _backward)


def fits_a_cluster(x: Tensor) -> bool:
    """Whether the largest clusters can hold a row."""
    return Rows(1, x.shape[-1], x.dtype, -1, True).packs <= most_packs(TENSORS["fwd"]) * MOST_BLOCKS


@planned
def _way(
    shape: tuple[int, ...], dtype: torch.dtype, device: int, dim: int, log: bool
) -> Callable[[Tensor], Tensor] | None:
    """From x as it lies in memory to its softmax; None if that is torch's to do."""
    if not has_elements(shape, dtype, dim):
        return None
    return filling(_plan_forward(shape, dtype, device, True, dim, log, "best"), shape)


def softmaxed(smallest: int, x: Any, dim: Any, dtype: Any, log: bool) -> Tensor | None:
    """The softmax of x over dim, or its logarithm, by our kernels; None if they cannot take it as torch would."""
    if not has_at_least(smallest, x) or type(dim) is not int:
        return None
    if dtype is None and is_quiet() and is_ready(x):
        way = _way(x.shape, x.dtype, x.get_device(), dim, log)
        return way and way(x)
    if -x.dim() <= dim < x.dim() and dtype in (None, x.dtype) and runs_here(x):
        return softmax_forward(x, dim, log, "best")
    return None
