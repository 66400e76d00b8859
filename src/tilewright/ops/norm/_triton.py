"""The norms in Triton: whole rows in registers, as one block or as chunks, or read twice where they are too long.

Forward stores mean and 1 / sqrt(…) of each row as stats [M, 2] where backward needs them. In backward a fixed number of
programs strides over the rows, each with partial sums of dw and db in registers; a second kernel adds them. Long rows
are split into blocks of columns, each with programs of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.gpus import GPUFacts
from tilewright.runtime.launch import Launcher, PreparedLaunch, shared_memory
from tilewright.runtime.sizes import cdiv, next_power_of_2, quarter_octave, rows_per_program, vector_hint

MAX_ROW = 32768  # elements that one program holds in registers
TILE, MIN_CHUNK = 4096, 64  # elements of a forward program, if it is not tuned; and of the narrowest chunk


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _multiple_of(n, VECTOR: tl.constexpr):
    """Tell the compiler that n is a multiple of VECTOR."""
    if VECTOR > 1:
        return n // VECTOR * VECTOR
    else:
        return n


@triton.jit
def _apply_weight(x, w_ptr, offs_n, N, offset, EVEN_N: tl.constexpr):
    """Multiply rows by offset + weight."""
    if w_ptr is not None:
        x *= _load_parameter(w_ptr, offs_n, N, EVEN_N) + offset
    return x


@triton.jit
def _add_bias(x, b_ptr, offs_n, N, EVEN_N: tl.constexpr):
    """Add the bias to rows."""
    if b_ptr is not None:
        x += _load_parameter(b_ptr, offs_n, N, EVEN_N)
    return x


@triton.jit
def _load_parameter(ptr, offs_n, N, EVEN_N: tl.constexpr):
    if EVEN_N:
        return tl.load(ptr + offs_n[None, :]).to(tl.float32)
    else:
        return tl.load(ptr + offs_n[None, :], mask=(offs_n < N)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _chunk_mask(in_rows, k: tl.constexpr, offs_n, N, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return which elements of chunk k exist: only the last one can be partial."""
    if not EVEN_N and k + 1 == CHUNKS:
        return in_rows & (k * BLOCK_N + offs_n < N)[None, :]
    else:
        return in_rows


@triton.jit
def _load_chunks(ptr, offs, in_rows, offs_n, N, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load rows [BLOCK_M, N] as a tuple of chunks [BLOCK_M, BLOCK_N], with zeros past their end."""
    chunks = ()
    for k in tl.static_range(CHUNKS):
        mask = _chunk_mask(in_rows, k, offs_n, N, EVEN_N, CHUNKS, BLOCK_N)
        chunk = tl.load(ptr + k * BLOCK_N + offs, mask=mask, other=0.0, eviction_policy="evict_last")
        chunks = chunks + (chunk,)  # noqa: RUF005  Triton does not know *chunks
    return chunks


@triton.jit
def _add_chunks(
    xs, rs, s_ptr, offs, in_rows, offs_n, N, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the sums of two tuples of chunks, and store them."""
    chunks = ()
    for k in tl.static_range(CHUNKS):
        chunk = (xs[k].to(tl.float32) + rs[k].to(tl.float32)).to(s_ptr.dtype.element_ty)
        mask = _chunk_mask(in_rows, k, offs_n, N, EVEN_N, CHUNKS, BLOCK_N)
        tl.store(s_ptr + k * BLOCK_N + offs, chunk, mask=mask)
        chunks = chunks + (chunk,)  # noqa: RUF005
    return chunks


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
    stride_xm,
    eps,
    offset,
    IS_RMS: tl.constexpr,
    EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A row is CHUNKS blocks of BLOCK_N columns, of which only the last is masked, so few lanes are idle.

    N is a multiple of VECTOR. stride_xm is None where the rows of x follow each other, as those of all others do.
    """
    N = _multiple_of(N, VECTOR)
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may exceed 2**31
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    offs_x = offs
    if stride_xm is not None:
        offs_x = offs_m[:, None] * _multiple_of(stride_xm, VECTOR) + offs_n[None, :]
    in_rows = (offs_m < M)[:, None]
    ws = ()
    bs = ()
    for k in tl.static_range(CHUNKS):
        offs_k = k * BLOCK_N + offs_n
        w = _apply_weight(tl.full([1, BLOCK_N], 1.0, tl.float32), w_ptr, offs_k, N, offset, EVEN_N)
        b = _add_bias(tl.zeros([1, BLOCK_N], tl.float32), b_ptr, offs_k, N, EVEN_N)
        ws = ws + (w,)  # noqa: RUF005  Triton does not know *ws
        bs = bs + (b,)  # noqa: RUF005
    xs = _load_chunks(x_ptr, offs_x, in_rows, offs_n, N, EVEN_N, CHUNKS, BLOCK_N)
    if r_ptr is not None:
        rs = _load_chunks(r_ptr, offs, in_rows, offs_n, N, EVEN_N, CHUNKS, BLOCK_N)
    tl.debug_barrier()  # keeps the loads of the weights with those of the rows; the compiler would sink them
    if r_ptr is not None:
        xs = _add_chunks(xs, rs, s_ptr, offs, in_rows, offs_n, N, EVEN_N, CHUNKS, BLOCK_N)
    mean = tl.zeros([BLOCK_M], tl.float32)
    if not IS_RMS:
        total = xs[0].to(tl.float32)
        for k in tl.static_range(1, CHUNKS):
            total += xs[k].to(tl.float32)
        mean = tl.sum(total, axis=1) / N
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.static_range(CHUNKS):
        x = xs[k].to(tl.float32)
        if not IS_RMS:
            x -= mean[:, None]
            if not EVEN_N and k + 1 == CHUNKS:
                x = tl.where((k * BLOCK_N + offs_n < N)[None, :], x, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m * 2, mean, mask=offs_m < M)
        tl.store(stats_ptr + offs_m * 2 + 1, rstd, mask=offs_m < M)
    for k in tl.static_range(CHUNKS):
        x = xs[k].to(tl.float32)
        if not IS_RMS:
            x -= mean[:, None]
        y = x * rstd[:, None] * ws[k] + bs[k]
        mask = _chunk_mask(in_rows, k, offs_n, N, EVEN_N, CHUNKS, BLOCK_N)
        tl.store(y_ptr + k * BLOCK_N + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    N = _multiple_of(N, VECTOR)
    m = tl.program_id(0).to(tl.int64)
    row = m * N
    lanes = tl.arange(0, CHUNK)
    center = tl.zeros([CHUNK], tl.float32)
    if not IS_RMS:  # each lane sums around its first element; the row is longer than a chunk
        center = tl.load(x_ptr + row + lanes, eviction_policy="evict_last").to(tl.float32)
        if r_ptr is not None:
            center += tl.load(r_ptr + row + lanes, eviction_policy="evict_last").to(tl.float32)
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
        x = tl.where(mask, x - center, 0.0)
        totals += x
        squares += x * x
    if IS_RMS:
        mean = 0.0
        square = tl.sum(squares, axis=0) / N
    else:
        counts = tl.cdiv(N - lanes, CHUNK).to(tl.float32)
        center += totals / counts
        mean = tl.sum(center * counts, axis=0) / N
        squares += counts * (center - mean) * (center - mean) - totals * totals / counts
        square = tl.maximum(tl.sum(squares, axis=0) / N, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = tl.rsqrt(square + eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + m * 2, mean)
        tl.store(stats_ptr + m * 2 + 1, rstd)
    normed_ptr = x_ptr
    if r_ptr is not None:
        normed_ptr = s_ptr
    # Backwards, since the end of the row is what the first pass left in L2.
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
    """Load mean and 1 / sqrt(…) of each row; 0 past the last row, which then contributes nothing."""
    mean = tl.load(stats_ptr + offs_m * 2, mask=offs_m < M, other=0.0)
    return mean, tl.load(stats_ptr + offs_m * 2 + 1, mask=offs_m < M, other=0.0)


@triton.jit
def _normed(x, mean, rstd, IS_RMS: tl.constexpr):
    """Normalize rows, before weight and bias."""
    x = x.to(tl.float32)
    if not IS_RMS:
        x -= mean
    return x * rstd


@triton.jit
def _row_means(x, dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS: tl.constexpr, EVEN_N: tl.constexpr):
    """Return mean(g h) and mean(g) of each row. Past the end of a row dy is 0."""
    g = _apply_weight(
        dy.to(tl.float32), w_ptr, offs_n, N, offset, EVEN_N
    )  # reloaded from L1 rather than kept in registers
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
    EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dw_ptr and db_ptr take the partial sums, [programs, N].

    PREFETCH: the next rows are loaded and reduced while the gradients of these are written. Only sums and stats stay in
    registers until then; the rows themselves are loaded again, from L2.
    """
    N = _multiple_of(N, VECTOR)
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.num_programs(0) * BLOCK_M
    dw = tl.zeros([BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    if PREFETCH:
        first_x, first_dy = _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N)
        mean, rstd = _load_stats(stats_ptr, offs_m, M)
        gh, g_mean = _row_means(first_x, first_dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS, EVEN_N)
    for _ in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        if PREFETCH:
            next_x, next_dy = _load_pair(x_ptr, dy_ptr, offs_m + step, offs_n, M, N)
            next_mean, next_rstd = _load_stats(stats_ptr, offs_m + step, M)
        x, dy = _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N)
        if not PREFETCH:
            mean, rstd = _load_stats(stats_ptr, offs_m, M)
            gh, g_mean = _row_means(x, dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS, EVEN_N)
        h = _normed(x, mean[:, None], rstd[:, None], IS_RMS)
        dy = dy.to(tl.float32)
        dx = _apply_weight(dy, w_ptr, offs_n, N, offset, EVEN_N)
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
        if PREFETCH:
            mean = next_mean
            rstd = next_rstd
            gh, g_mean = _row_means(next_x, next_dy, mean, rstd, w_ptr, offs_n, N, offset, IS_RMS, EVEN_N)
        offs_m += step
    partial = tl.program_id(0).to(tl.int64) * N
    if dw_ptr is not None:
        tl.store(dw_ptr + partial + offs_n, dw, mask=offs_n < N)
    if db_ptr is not None:
        tl.store(db_ptr + partial + offs_n, db, mask=offs_n < N)


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
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same for long rows: the programs of each block of columns read whole rows, in chunks, for the row sums."""
    N = _multiple_of(N, VECTOR)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_bounds = offs_n < N
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
        h = _normed(tl.load(x_ptr + row + offs_n, mask=in_bounds, other=0.0), mean, rstd, IS_RMS)
        dy = tl.load(dy_ptr + row + offs_n, mask=in_bounds, other=0.0).to(tl.float32)
        dx = dy
        if w_ptr is not None:
            dx *= tl.load(w_ptr + offs_n, mask=in_bounds, other=0.0).to(tl.float32) + offset
        if IS_RMS:
            gh_sum = tl.sum(ghs, axis=0)
        else:
            gh_sum, g_sum = tl.reduce((ghs, gs), 0, _add_pairs)
            dx -= g_sum / N
        dx = rstd * (dx - h * (gh_sum / N))
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + row + offs_n, mask=in_bounds, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=in_bounds)
        if dw_ptr is not None:
            dw += dy * h
        if db_ptr is not None:
            db += dy
    partial = tl.program_id(1).to(tl.int64) * N
    if dw_ptr is not None:
        tl.store(dw_ptr + partial + offs_n, dw, mask=in_bounds)
    if db_ptr is not None:
        tl.store(db_ptr + partial + offs_n, db, mask=in_bounds)


def _chunk_width(N: int) -> int:
    """Return the width of chunks, a power of two, that cover rows of about N elements with at most a quarter idle.

    Chunks cost registers for offsets and masks, so a row just below a power of two is one chunk.
    """
    block = next_power_of_2(N)
    if block * 3 // 4 < N:
        return block
    return min(block, max(MIN_CHUNK, block // 4 if block * 5 // 8 < N else block // 8))


def _row_config(N: int, elements: int, per_thread: int) -> Config:
    """Configure whole rows, about `elements` per program."""
    block = _chunk_width(N)
    row = cdiv(N, block) * block
    rows = _floor_power_of_2(max(1, elements // row))
    warps = _floor_power_of_2(max(1, rows * row // (32 * per_thread)))
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": min(32, warps)}


def _floor_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _backward_config(
    gpu: GPUFacts, N: int, elements: int, per_thread: int, resident: int, stages: int = 1, *, prefetch: bool
) -> Config:
    """Configure backward in whole rows, with programs for `resident` warps per multiprocessor."""
    config = _row_config(next_power_of_2(N), elements, per_thread)
    programs = gpu.sms * max(1, resident // config["num_warps"])
    return config | {"PREFETCH": prefetch, "PROGRAMS": programs, "STAGES": stages}


def _chunk_config(chunk: int, warps: int) -> Config:
    """Configure forward in chunks of a row."""
    return {"CHUNK": chunk, "STAGES": 3, "num_warps": warps}


def _column_config(gpu: GPUFacts, N: int, block: int, chunk: int, warps: int) -> Config:
    """Configure backward in blocks of columns."""
    programs = max(1, gpu.sms * max(1, 16 // warps) * block // N)
    return {"PROGRAMS": programs, "BLOCK_N": block, "CHUNK": chunk, "STAGES": 3, "num_warps": warps}


def _default(gpu: GPUFacts, op: str, direction: str, size: int, N: int) -> Config:
    if direction == "forward":
        held = N if "rms" in op else 2 * N  # registers: layer_norm also holds x - mean
        return _row_config(N, TILE, 32) if held <= MAX_ROW else _chunk_config(8192, 16)
    if N <= 8192:
        return _backward_config(gpu, N, 2048, 16, 16, prefetch=N > 4096)
    return _column_config(gpu, N, min(N, 16384 if op == "rms_norm" else 8192), 4096, 16)


def _choices(gpu: GPUFacts, op: str, direction: str, size: int, N: int) -> list[Config]:
    found = []
    if direction == "forward":
        if N <= MAX_ROW:
            found += [_row_config(N, elements, per) for elements in (1024, 2048, 4096, 8192) for per in (8, 16, 32, 64)]
        chunks = [(2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32)]
        found += [
            _chunk_config(chunk, warps) for chunk, warps in chunks if 2 * chunk <= N
        ]  # rows are longer than N / 2
    elif N <= 8192:
        for elements, per in ((2048, 16), (4096, 16), (4096, 32)):
            found += [_backward_config(gpu, N, elements, per, 16, stages, prefetch=False) for stages in (1, 2)]
            found += [_backward_config(gpu, N, elements, per, 16, prefetch=True)]
        found += [_backward_config(gpu, N, 2048, 16, 24, prefetch=False)]
    else:
        found += [_column_config(gpu, N, block, 4096, 16) for block in (8192, 16384)]
        found += [_column_config(gpu, N, block, 8192, 32) for block in (8192, 16384, 32768) if block <= N]
        if N <= MAX_ROW:
            found += [_backward_config(gpu, N, N, 16, 32, stages, prefetch=False) for stages in (1, 2)]
            found += [_backward_config(gpu, N, N, 16, 32, prefetch=True)]
    most = gpu.shared_per_block  # bytes of pipelined tiles
    fits = [c for c in found if (c.get("STAGES", 1) - 1) * c.get("BLOCK_M", 0) * N * size * 4 <= most]
    return [c for i, c in enumerate(fits) if c not in fits[:i]]


CONFIG = ConfigTable("norm.json", _default, _choices, takes_gpu=True)
_launch_fwd = Launcher(_norm_fwd)
_launch_fwd_long = Launcher(_norm_fwd_long)
_launch_bwd = Launcher(_norm_bwd)
_launch_bwd_long = Launcher(_norm_bwd_long)


def _config(op: str, direction: str, dtype: torch.dtype, device: int, N: int) -> Config:
    """Return the kernel's constexpr arguments and, for backward, the largest number of programs."""
    bucket = quarter_octave(N) if direction == "forward" else next_power_of_2(N)
    found = CONFIG(device, op, direction, dtype.itemsize, bucket)
    return {"IS_RMS": op.endswith("rms_norm"), **found}


def plan_triton_forward(
    op: str, dtype: torch.dtype, device: int, M: int, N: int, stride: int | None, eps: float, offset: float
) -> PreparedLaunch | None:
    """Return the launch that takes x, residual, weight, bias, y, sum and stats.

    `stride` is the distance between the rows of x if they do not follow each other. Rows too long for registers must:
    then this returns None.
    """
    config = _config(op, "forward", dtype, device, N)
    if "CHUNK" in config:
        if stride is not None:
            return None
        read = 2 if op.startswith("add_") else 1  # tensors
        held = shared_memory(device) // (read * config["CHUNK"] * dtype.itemsize)
        config["STAGES"] = min(config["STAGES"], 1 + held)
        return _launch_fwd_long.prepare((M,), N, eps, offset, VECTOR=vector_hint(N), **config)
    block = config["BLOCK_N"]
    chunks = cdiv(N, block)
    rows = rows_per_program(M, {**config, "BLOCK_N": chunks * block}, device)
    known = {"EVEN_N": N % block == 0, "VECTOR": vector_hint(N, stride or 0), "CHUNKS": chunks}
    return _launch_fwd.prepare((cdiv(M, rows),), M, N, stride, eps, offset, **config | known | {"BLOCK_M": rows})


def plan_triton_backward(
    op: str, dtype: torch.dtype, device: int, M: int, N: int, offset: float
) -> tuple[PreparedLaunch, int]:
    """Return the launch and the number of partial sums.

    The launch takes x, weight, stats, dy, dsum, dx and the partial sums of dw and db.
    """
    config = _config(op, "backward", dtype, device, N)
    programs = min(config.pop("PROGRAMS"), cdiv(M, config.get("BLOCK_M", 1)))
    config["VECTOR"] = vector_hint(N)
    if "CHUNK" in config:
        grid = (cdiv(N, config["BLOCK_N"]), programs)
        return _launch_bwd_long.prepare(grid, M, N, offset, **config), programs
    config["EVEN_N"] = config["BLOCK_N"] == N
    # With an FMA, dy * w - mean(dy * w) would keep the rounding of the product where the difference is zero.
    fuses = config["IS_RMS"]
    return _launch_bwd.prepare((programs,), M, N, offset, **config, enable_fp_fusion=fuses), programs
