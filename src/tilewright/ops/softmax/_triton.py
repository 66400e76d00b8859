"""Triton kernels of softmax and log_softmax: over rows and over columns, forward and backward.

A row that fits in registers is one tile. A longer one is read twice (`_online_fwd`, `_two_pass_bwd`). A dimension that
is not the last is reduced in columns. `LOG` selects log_softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops._exp import exp


@triton.jit
def _normalize(x, m, total, LOG: tl.constexpr):
    if LOG:
        return x - m - tl.log(total)
    else:
        return exp(x - m) * (1.0 / total)


@triton.jit
def _gradient_term(y, dy, LOG: tl.constexpr):
    """Return the terms whose row sum the gradient needs."""
    if LOG:
        return dy
    else:
        return y * dy


@triton.jit
def _gradient(y, dy, total, LOG: tl.constexpr, MASKED: tl.constexpr = False):
    """Return the gradient of x. MASKED: an output of zero has gradient zero, whatever the rest of the row holds."""
    if LOG:
        return dy - exp(y) * total
    elif MASKED:
        return tl.where(y == 0.0, 0.0, y * (dy - total))
    else:
        return y * (dy - total)


@triton.jit
def _tile_fwd(
    x_ptr, y_ptr, M, N, LOG: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    N = N // VECTOR * VECTOR  # unchanged, but tells the compiler the alignment of rows
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may exceed 2**31
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    m = tl.max(x, axis=1)[:, None]
    total = tl.sum(exp(x - m), axis=1)[:, None]
    tl.store(y_ptr + offs, _normalize(x, m, total, LOG).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _online_fwd(x_ptr, y_ptr, N, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    y_ptr += row * N
    # One running maximum per row: rescaling the sums costs one exp per block instead of one per element.
    m = -float("inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # all -inf so far: avoid the NaN of -inf + inf
        total = total * exp(m - shift) + exp(x - shift)
        m = new_max
    total_sum = tl.sum(total, axis=0)
    # Backwards, since the end of the row is what the first pass left in L2.
    for start in range(0, N, BLOCK_N):
        offs_n = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N - start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        y = _normalize(x, m, total_sum, LOG)
        tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _columns_fwd(
    x_ptr, y_ptr, N, inner, tiles,
    LOG: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    start = program // tiles * N * inner
    offs_i = program % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    x_ptr += start + offs_i[None, :]
    y_ptr += start + offs_i[None, :]
    in_bounds = (offs_i < inner)[None, :]
    if ONE_TILE:
        mask = (offs_n < N)[:, None] & in_bounds
        x = tl.load(x_ptr + offs_n[:, None] * inner, mask=mask, other=-float("inf")).to(tl.float32)
        m = tl.max(x, axis=0)[None, :]
        total = tl.sum(exp(x - m), axis=0)[None, :]
        y = _normalize(x, m, total, LOG)
        tl.store(y_ptr + offs_n[:, None] * inner, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        m = tl.full([BLOCK_I], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_I], tl.float32)
        for first in range(0, N, BLOCK_N):
            offs = (first + offs_n)[:, None] * inner
            mask = (first + offs_n < N)[:, None] & in_bounds
            x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
            new_max = tl.maximum(m, tl.max(x, axis=0))
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)
            total = total * exp(m - shift) + tl.sum(exp(x - shift[None, :]), axis=0)
            m = new_max
        for first in range(0, N, BLOCK_N):
            offs = (first + offs_n)[:, None] * inner
            mask = (first + offs_n < N)[:, None] & in_bounds
            x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
            y = _normalize(x, m[None, :], total[None, :], LOG)
            tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_bwd(
    y_ptr, dy_ptr, dx_ptr, M, N, scale,
    LOG: tl.constexpr, MASKED: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    N = N // VECTOR * VECTOR
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    y = tl.load(y_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total = tl.sum(_gradient_term(y, dy, LOG), axis=1)[:, None]
    tl.store(dx_ptr + offs, (_gradient(y, dy, total, LOG, MASKED) * scale).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _two_pass_bwd(y_ptr, dy_ptr, dx_ptr, N, scale, LOG: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
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
        dx = _gradient(y, dy, inner, LOG, MASKED) * scale
        tl.store(dx_ptr + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _columns_bwd(
    y_ptr, dy_ptr, dx_ptr, N, inner, tiles, LOG: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    offs_i = program % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    base = program // tiles * N * inner + offs_i[None, :]
    in_bounds = (offs_i < inner)[None, :]
    total = tl.zeros([BLOCK_I], tl.float32)
    for first in range(0, N, BLOCK_N):
        offs = base + (first + offs_n)[:, None] * inner
        mask = (first + offs_n < N)[:, None] & in_bounds
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(_gradient_term(y, dy, LOG), axis=0)
    for first in range(0, N, BLOCK_N):
        offs = base + (first + offs_n)[:, None] * inner
        mask = (first + offs_n < N)[:, None] & in_bounds
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, _gradient(y, dy, total[None, :], LOG).to(dx_ptr.dtype.element_ty), mask=mask)
