"""The norms in Triton: whole rows in registers, or, where they are too long, in blocks, twice.

Forward leaves each row's mean and 1 / sqrt(...), stats [M, 2], where they are wanted. Backward has each of a fixed
number of programs take rows at a fixed distance and keep its share of dw and db in registers; a second kernel adds up
the shares. Long rows have the columns cut into blocks with programs of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.runtime.configs import Config, Tuned
from tilewright.runtime.launch import Launcher, Prepared, shared_memory
from tilewright.runtime.sizes import cdiv, next_power_of_2, rows_each

LONGEST_ROW = 32768  # elements that one program can hold in registers


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _scaled(x, w_ptr, offs_n, N, offset, FILLED: tl.constexpr):
    """Rows times offset + weight."""
    if w_ptr is not None:
        x *= _row_of(w_ptr, offs_n, N, FILLED) + offset
    return x


@triton.jit
def _moved(x, b_ptr, offs_n, N, FILLED: tl.constexpr):
    """Rows plus bias."""
    if b_ptr is not None:
        x += _row_of(b_ptr, offs_n, N, FILLED)
    return x


@triton.jit
def _row_of(ptr, offs_n, N, FILLED: tl.constexpr):
    if FILLED:
        return tl.load(ptr + offs_n[None, :]).to(tl.float32)
    else:
        return tl.load(ptr + offs_n[None, :], mask=(offs_n < N)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _norm_fwd(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    stats_ptr,
    M,
    N,
    eps,
    offset,
    IS_RMS: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may pass 2**31
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None]
    if not FILLED:
        mask = mask & (offs_n < N)[None, :]
    w = _scaled(tl.full([1, BLOCK_N], 1.0, tl.float32), w_ptr, offs_n, N, offset, FILLED)
    b = _moved(tl.zeros([1, BLOCK_N], tl.float32), b_ptr, offs_n, N, FILLED)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if r_ptr is not None:
        r = tl.load(r_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.debug_barrier()  # so that the weights come with the rows: the compiler would put them off
    if r_ptr is not None:
        s = (x + r).to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + offs, s, mask=mask)
        x = s.to(tl.float32)
    mean = tl.zeros([BLOCK_M], tl.float32)
    if not IS_RMS:
        mean = tl.sum(x, axis=1) / N
        x -= mean[:, None]
        if not FILLED:
            x = tl.where(mask, x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m * 2, mean, mask=offs_m < M)
        tl.store(stats_ptr + offs_m * 2 + 1, rstd, mask=offs_m < M)
    y = x * rstd[:, None] * w + b
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_fwd_long(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    stats_ptr,
    N,
    eps,
    offset,
    IS_RMS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    row = m * N
    lanes = tl.arange(0, CHUNK)
    centre = tl.zeros([CHUNK], tl.float32)
    if not IS_RMS:  # each lane's sums are around what it meets first; the row is longer than a chunk
        centre = tl.load(x_ptr + row + lanes, eviction_policy="evict_last").to(tl.float32)
        if r_ptr is not None:
            centre += tl.load(r_ptr + row + lanes, eviction_policy="evict_last").to(tl.float32)
    totals = tl.zeros([CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, N, CHUNK, num_stages=STAGES):
        offs_n = start + lanes
        mask = offs_n < N
        x = tl.load(x_ptr + row + offs_n, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if r_ptr is not None:
            r = tl.load(r_ptr + row + offs_n, mask=mask, other=0.0, eviction_policy="evict_first")
            s = (x + r.to(tl.float32)).to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + row + offs_n, s, mask=mask)
            x = s.to(tl.float32)
        x = tl.where(mask, x - centre, 0.0)
        totals += x
        squares += x * x
    if IS_RMS:
        mean = 0.0
        square = tl.sum(squares, axis=0) / N
    else:
        counts = tl.cdiv(N - lanes, CHUNK).to(tl.float32)
        centre += totals / counts
        mean = tl.sum(centre * counts, axis=0) / N
        squares += counts * (centre - mean) * (centre - mean) - totals * totals / counts
        square = tl.maximum(tl.sum(squares, axis=0) / N, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = tl.rsqrt(square + eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + m * 2, mean)
        tl.store(stats_ptr + m * 2 + 1, rstd)
    normed_ptr = x_ptr
    if r_ptr is not None:
        normed_ptr = s_ptr
    # Last chunk first: the end of the row is what the first pass left in the cache.
    for start in range(0, N, CHUNK):
        offs_n = (tl.cdiv(N, CHUNK) - 1) * CHUNK - start + lanes
        mask = offs_n < N
        x = tl.load(normed_ptr + row + offs_n, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = (x - mean) * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + offs_n, mask=mask, other=0.0, eviction_policy="evict_last")
            y *= w.to(tl.float32) + offset
        if b_ptr is not None:
            y += tl.load(b_ptr + offs_n, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + row + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N):
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last")
    return x, tl.load(dy_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_stats(stats_ptr, offs_m, M):
    """mean and 1 / sqrt(...) of each row; 0 where there is none, so that nothing comes of it."""
    mean = tl.load(stats_ptr + offs_m * 2, mask=offs_m < M, other=0.0)
    return mean, tl.load(stats_ptr + offs_m * 2 + 1, mask=offs_m < M, other=0.0)


@triton.jit
def _normed(x, mean, rstd, IS_RMS: tl.constexpr):
    """Rows of one size, before the weights."""
    x = x.to(tl.float32)
    if not IS_RMS:
        x -= mean
    return x * rstd


@triton.jit
def _row_means(x, dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS: tl.constexpr, FILLED: tl.constexpr):
    """mean(g h) and mean(g) of each row. Past its end dy is 0."""
    g = _scaled(dy.to(tl.float32), w_ptr, offs_n, N, offset, FILLED)  # from the cache: registers are worth more
    gh = g * _normed(x, mean[:, None], rstd[:, None], IS_RMS)
    if IS_RMS:
        gh_sum = tl.sum(gh, axis=1)
        g_sum = tl.zeros_like(gh_sum)
    else:
        gh_sum, g_sum = tl.reduce((gh, g), 1, _add_pairs)
    return gh_sum / N, g_sum / N


@triton.jit
def _norm_bwd(
    x_ptr,
    w_ptr,
    stats_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    offset,
    IS_RMS: tl.constexpr,
    FILLED: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dw_ptr and db_ptr take the shares of the programs, [programs, N].

    AHEAD: while the gradients of some rows are written, the next rows are on their way to be summed up. Only sums and
    stats live from one to the other, so few registers are needed; the rows are read again, from the cache.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.num_programs(0) * BLOCK_M
    dw = tl.zeros([BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    if AHEAD:
        first_x, first_dy = _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N)
        mean, rstd = _load_stats(stats_ptr, offs_m, M)
        gh, g_mean = _row_means(first_x, first_dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS, FILLED)
    for _ in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        if AHEAD:
            next_x, next_dy = _load_pair(x_ptr, dy_ptr, offs_m + step, offs_n, M, N)
            next_mean, next_rstd = _load_stats(stats_ptr, offs_m + step, M)
        x, dy = _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N)
        if not AHEAD:
            mean, rstd = _load_stats(stats_ptr, offs_m, M)
            gh, g_mean = _row_means(x, dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS, FILLED)
        h = _normed(x, mean[:, None], rstd[:, None], IS_RMS)
        dy = dy.to(tl.float32)
        dx = _scaled(dy, w_ptr, offs_n, N, offset, FILLED)
        if not IS_RMS:
            dx -= g_mean[:, None]
        dx = (dx - h * gh[:, None]) * rstd[:, None]
        offs = offs_m[:, None] * N + offs_n[None, :]
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dw_ptr is not None:
            dw += tl.sum(dy * h, axis=0)
        if db_ptr is not None:
            db += tl.sum(dy, axis=0)
        if AHEAD:
            mean = next_mean
            rstd = next_rstd
            gh, g_mean = _row_means(next_x, next_dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS, FILLED)
        offs_m += step
    share = tl.program_id(0).to(tl.int64) * N
    if dw_ptr is not None:
        tl.store(dw_ptr + share + offs_n, dw, mask=offs_n < N)
    if db_ptr is not None:
        tl.store(db_ptr + share + offs_n, db, mask=offs_n < N)


@triton.jit
def _norm_bwd_long(
    x_ptr,
    w_ptr,
    stats_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    offset,
    IS_RMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As above; each block of columns has programs of its own, which read whole rows, in chunks, for the sums."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = offs_n < N
    dw = tl.zeros([BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    for m in range(tl.program_id(1).to(tl.int64), M, tl.num_programs(1)):
        row = m * N
        mean = tl.load(stats_ptr + m * 2)
        rstd = tl.load(stats_ptr + m * 2 + 1)
        gs = tl.zeros([CHUNK], tl.float32)
        ghs = tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, N, CHUNK, num_stages=STAGES):
            offs_c = start + tl.arange(0, CHUNK)
            mask = offs_c < N
            x = tl.load(x_ptr + row + offs_c, mask=mask, other=0.0)
            g = tl.load(dy_ptr + row + offs_c, mask=mask, other=0.0).to(tl.float32)
            if w_ptr is not None:
                g *= tl.load(w_ptr + offs_c, mask=mask, other=0.0).to(tl.float32) + offset
            gs += g
            ghs += g * _normed(x, mean, rstd, IS_RMS)
        h = _normed(tl.load(x_ptr + row + offs_n, mask=in_row, other=0.0), mean, rstd, IS_RMS)
        dy = tl.load(dy_ptr + row + offs_n, mask=in_row, other=0.0).to(tl.float32)
        dx = dy
        if w_ptr is not None:
            dx *= tl.load(w_ptr + offs_n, mask=in_row, other=0.0).to(tl.float32) + offset
        if IS_RMS:
            gh_sum = tl.sum(ghs, axis=0)
        else:
            gh_sum, g_sum = tl.reduce((ghs, gs), 0, _add_pairs)
            dx -= g_sum / N
        dx = rstd * (dx - h * (gh_sum / N))
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + row + offs_n, mask=in_row, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
        if dw_ptr is not None:
            dw += dy * h
        if db_ptr is not None:
            db += dy
    share = tl.program_id(1).to(tl.int64) * N
    if dw_ptr is not None:
        tl.store(dw_ptr + share + offs_n, dw, mask=in_row)
    if db_ptr is not None:
        tl.store(db_ptr + share + offs_n, db, mask=in_row)


WAVE = 132  # programs: one for each of an H200's multiprocessors
SHARED = 200 * 1024  # bytes that pipelined tiles may take


def _rows(N: int, elements: int, per_thread: int, resident: int = 0, stages: int = 1, **more: Any) -> Config:
    """Whole rows, about so many elements a program. Backward has programs to fill so many resident warps."""
    rows = max(1, elements // N)
    warps = min(32, max(1, rows * N // (32 * per_thread)))
    config = {"BLOCK_M": rows, "BLOCK_N": N, "num_warps": warps, **more}
    return config | {"PROGRAMS": WAVE * max(1, resident // warps), "STAGES": stages} if resident else config


def _chunks(chunk: int, warps: int) -> Config:
    """Forward by chunks of a row."""
    return {"CHUNK": chunk, "STAGES": 3, "num_warps": warps}


def _columns(N: int, block: int, chunk: int, warps: int) -> Config:
    """Backward by blocks of columns."""
    programs = max(1, WAVE * max(1, 16 // warps) * block // N)
    return {"PROGRAMS": programs, "BLOCK_N": block, "CHUNK": chunk, "STAGES": 3, "num_warps": warps}


def _default(op: str, direction: str, size: int, N: int) -> Config:
    if direction == "forward":
        held = N if "rms" in op else 2 * N  # as registers count it: the mean is taken off, too
        return _rows(N, 4096, 32) if held <= LONGEST_ROW else _chunks(8192, 16)
    if N <= 8192:
        return _rows(N, 2048, 16, resident=16, AHEAD=N > 4096)
    return _columns(N, min(N, 16384 if op == "rms_norm" else 8192), 4096, 16)


def _choices(op: str, direction: str, size: int, N: int) -> list[Config]:
    found = []
    if direction == "forward":
        if N <= LONGEST_ROW:
            found += [_rows(N, elements, per) for elements in (1024, 2048, 4096, 8192) for per in (8, 16, 32, 64)]
        chunks = [(2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32)]
        found += [_chunks(chunk, warps) for chunk, warps in chunks if 2 * chunk <= N]  # rows are longer than N / 2
    elif N <= 8192:
        for elements, per in ((2048, 16), (4096, 16), (4096, 32)):
            found += [_rows(N, elements, per, 16, stages, AHEAD=False) for stages in (1, 2)]
            found += [_rows(N, elements, per, 16, AHEAD=True)]
        found += [_rows(N, 2048, 16, resident=24, AHEAD=False)]
    else:
        found += [_columns(N, block, 4096, 16) for block in (8192, 16384)]
        found += [_columns(N, block, 8192, 32) for block in (8192, 16384, 32768) if block <= N]
        if N <= LONGEST_ROW:
            found += [_rows(N, N, 16, 32, stages, AHEAD=False) for stages in (1, 2)]
            found += [_rows(N, N, 16, 32, AHEAD=True)]
    fits = [c for c in found if (c.get("STAGES", 1) - 1) * c.get("BLOCK_M", 0) * N * size * 4 <= SHARED]
    return [c for i, c in enumerate(fits) if c not in fits[:i]]


CONFIG = Tuned("norm.json", _default, _choices)
_launch_fwd = Launcher(_norm_fwd)
_launch_fwd_long = Launcher(_norm_fwd_long)
_launch_bwd = Launcher(_norm_bwd)
_launch_bwd_long = Launcher(_norm_bwd_long)


def _config(op: str, direction: str, dtype: torch.dtype, device: int, N: int) -> Config:
    """The kernel's constants and, for backward, how many programs there are at most."""
    found = CONFIG(device, op, direction, dtype.itemsize, next_power_of_2(N))
    config = {"IS_RMS": op.endswith("rms_norm"), **found}
    return config if "CHUNK" in config else config | {"FILLED": config["BLOCK_N"] == N}


def forward_by_programs(
    op: str, dtype: torch.dtype, device: int, M: int, N: int, eps: float, offset: float
) -> Prepared:
    """Of x, residual, weight, bias: y and, with a residual, the sum; each row's mean and 1 / sqrt(...), if wanted."""
    config = _config(op, "forward", dtype, device, N)
    if "CHUNK" in config:
        read = 2 if op.startswith("add_") else 1  # tensors
        held = shared_memory(device) // (read * config["CHUNK"] * dtype.itemsize)
        config["STAGES"] = min(config["STAGES"], 1 + held)
        return _launch_fwd_long.prepare((M,), N, eps, offset, **config)
    config["BLOCK_M"] = rows_each(M, config)
    return _launch_fwd.prepare((cdiv(M, config["BLOCK_M"]),), M, N, eps, offset, **config)


def backward_by_programs(
    op: str, dtype: torch.dtype, device: int, M: int, N: int, offset: float
) -> tuple[Prepared, int]:
    """Of x, weight, stats, dy, dsum: dx, and the shares of the gradients of weight and bias that are wanted; and the
    number of shares."""
    config = _config(op, "backward", dtype, device, N)
    programs = min(config.pop("PROGRAMS"), cdiv(M, config.get("BLOCK_M", 1)))
    if "CHUNK" in config:
        grid = (cdiv(N, config["BLOCK_N"]), programs)
        return _launch_bwd_long.prepare(grid, M, N, offset, **config), programs
    # Fused to dy * w - mean(dy * w), a difference that should be nothing would keep the product's rounding.
    fuses = config["IS_RMS"]
    return _launch_bwd.prepare((programs,), M, N, offset, **config, enable_fp_fusion=fuses), programs
