"""What the norms share: each row of x, by itself or after a residual is added, brought to one size.

rms_norm: y = x r w, r = 1 / sqrt(mean x² + eps). layer_norm: y = (x - mean x) r w + b, r = 1 / sqrt(var x + eps).

Forward keeps rows in registers: one read, one write. Backward, with h = y before w and b, and g = dy w:
dx = r (g - h mean(g h)), for layer_norm less r mean(g) too; dw = sum of dy h and db = sum of dy over all rows.
It finds r again, since it must read x anyway, so that forward has nothing to save. Each of a fixed number of programs
takes rows at a fixed distance and keeps its share of dw and db in registers; a second kernel adds up the shares. Shapes
and the configuration decide the order of all sums, so results are the same every time.

A row too long for registers is taken in blocks, twice. The sums of squares of layer_norm are then taken around the mean
m of the first block: of B blocks, (mean - m)² <= B var, so little cancels in var = mean (x - m)² - (mean - m)².

The form "triton" is that. The form "cuda" has a cluster of blocks hold a row, however long; "best" is whichever wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._cuda import Source, is_installed
from tilewright.ops._dispatch import runs_here
from tilewright.ops._launch import Launcher
from tilewright.ops._operator import contiguous_like, operator
from tilewright.ops._tuned import Config, Tuned, planned

LONGEST_ROW = 32768  # elements that one program can hold in registers
EPS = torch.finfo(torch.float32).eps  # where rms_norm is given none: torch takes that of the type it computes in


def plain_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None, offset: float) -> Tensor:
    """By torch; in fp32 throughout where the weight is shifted or wider than x."""
    if isinstance(weight, Tensor) and (offset or _is_wider(weight, x)):
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.nn.functional.rms_norm(x.to(wide), shape, weight.to(wide) + offset, eps).to(x.dtype)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)


def plain_layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By torch; in fp32 throughout where weight and bias are wider than x, which not all of torch's kernels take."""
    given = [p for p in (weight, bias) if isinstance(p, Tensor)]
    if given and all(_is_wider(p, x) for p in given):
        return torch.nn.functional.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def _is_wider(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _scaled(x, w_ptr, offs_n, N, offset):
    """Rows times offset + weight."""
    if w_ptr is not None:
        x *= tl.load(w_ptr + offs_n[None, :], mask=(offs_n < N)[None, :], other=0.0).to(tl.float32) + offset
    return x


@triton.jit
def _moved(x, b_ptr, offs_n, N):
    """Rows plus bias."""
    if b_ptr is not None:
        x += tl.load(b_ptr + offs_n[None, :], mask=(offs_n < N)[None, :], other=0.0).to(tl.float32)
    return x


@triton.jit
def _norm_fwd(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    M,
    N,
    eps,
    offset,
    IS_RMS: tl.constexpr,
    FILLED: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    in_row = offs_n < N
    if HELD:  # the weights, in registers; else they come from the cache for each row
        w = _scaled(tl.full([1, BLOCK_N], 1.0, tl.float32), w_ptr, offs_n, N, offset)
        b = _moved(tl.zeros([1, BLOCK_N], tl.float32), b_ptr, offs_n, N)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M  # int64: M * N may pass 2**31
    for start in tl.range(first, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        offs_m = start + tl.arange(0, BLOCK_M)
        offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
        mask = (offs_m < M)[:, None] & in_row[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if r_ptr is not None:
            s = (x + tl.load(r_ptr + offs, mask=mask, other=0.0).to(tl.float32)).to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + offs, s, mask=mask)
            x = s.to(tl.float32)
        if not IS_RMS:
            x -= (tl.sum(x, axis=1) / N)[:, None]
            if not FILLED:
                x = tl.where(mask, x, 0.0)
        y = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N + eps))[:, None]
        y = y * w + b if HELD else _moved(_scaled(y, w_ptr, offs_n, N, offset), b_ptr, offs_n, N)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_fwd_long(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    N,
    eps,
    offset,
    IS_RMS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * N
    centre = 0.0
    if not IS_RMS:  # the row is longer than a chunk
        x = tl.load(x_ptr + row + tl.arange(0, CHUNK)).to(tl.float32)
        if r_ptr is not None:
            x += tl.load(r_ptr + row + tl.arange(0, CHUNK)).to(tl.float32)
        centre = tl.sum(x, axis=0) / CHUNK
    totals = tl.zeros([CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, N, CHUNK, num_stages=STAGES):
        offs_n = start + tl.arange(0, CHUNK)
        mask = offs_n < N
        x = tl.load(x_ptr + row + offs_n, mask=mask, other=0.0).to(tl.float32)
        if r_ptr is not None:
            s = (x + tl.load(r_ptr + row + offs_n, mask=mask, other=0.0).to(tl.float32)).to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + row + offs_n, s, mask=mask)
            x = s.to(tl.float32)
        x = tl.where(mask, x - centre, 0.0)
        totals += x
        squares += x * x
    square = tl.sum(squares, axis=0) / N
    if not IS_RMS:
        moved = tl.sum(totals, axis=0) / N
        centre += moved
        square = tl.maximum(square - moved * moved, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = 1.0 / tl.sqrt(square + eps)
    normed_ptr = x_ptr
    if r_ptr is not None:
        normed_ptr = s_ptr
    # Last chunk first: the end of the row is what the first pass left in the cache.
    for start in range(0, N, CHUNK):
        offs_n = (tl.cdiv(N, CHUNK) - 1) * CHUNK - start + tl.arange(0, CHUNK)
        mask = offs_n < N
        y = (tl.load(normed_ptr + row + offs_n, mask=mask, other=0.0).to(tl.float32) - centre) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + offs_n, mask=mask, other=0.0).to(tl.float32) + offset
        if b_ptr is not None:
            y += tl.load(b_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N):
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    return tl.load(x_ptr + offs, mask=mask, other=0.0), tl.load(dy_ptr + offs, mask=mask, other=0.0)


@triton.jit
def _row_sums(x, dy, w_ptr, offs_n, N, eps, offset, IS_RMS: tl.constexpr, FILLED: tl.constexpr):
    """mean, 1 / sqrt(...), mean(g h) and mean(g) of each row."""
    x = x.to(tl.float32)
    g = _scaled(dy.to(tl.float32), w_ptr, offs_n, N, offset)  # from the cache: registers are worth more
    if IS_RMS:
        square, gx = tl.reduce((x * x, g * x), 1, _add_pairs)
        mean = tl.zeros_like(square)
        g_sum = tl.zeros_like(square)
    else:
        mean = tl.sum(x, axis=1) / N
        x -= mean[:, None]
        if not FILLED:
            x = tl.where((offs_n < N)[None, :], x, 0.0)
        square, gx, g_sum = tl.reduce((x * x, g * x, g), 1, _add_triples)
    rstd = 1.0 / tl.sqrt(square / N + eps)
    return mean, rstd, gx * rstd / N, g_sum / N


@triton.jit
def _norm_bwd(
    x_ptr,
    w_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    eps,
    offset,
    IS_RMS: tl.constexpr,
    FILLED: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dw_ptr and db_ptr take the shares of the programs, [programs, N].

    AHEAD: while the gradients of some rows are written, the next rows are on their way to be summed up. Only sums live
    from one to the other, so few registers are needed; the rows are read again, from the cache.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.num_programs(0) * BLOCK_M
    dw = tl.zeros([BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    if AHEAD:
        first_x, first_dy = _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N)
        mean, rstd, gh, g_mean = _row_sums(first_x, first_dy, w_ptr, offs_n, N, eps, offset, IS_RMS, FILLED)
    for _ in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        if AHEAD:
            next_x, next_dy = _load_pair(x_ptr, dy_ptr, offs_m + step, offs_n, M, N)
        x, dy = _load_pair(x_ptr, dy_ptr, offs_m, offs_n, M, N)
        if not AHEAD:
            mean, rstd, gh, g_mean = _row_sums(x, dy, w_ptr, offs_n, N, eps, offset, IS_RMS, FILLED)
        rstd = tl.where(offs_m < M, rstd, 0.0)  # no inf * 0 in rows that are not there
        x = x.to(tl.float32)
        dy = dy.to(tl.float32)
        dx = _scaled(dy, w_ptr, offs_n, N, offset)
        if IS_RMS:
            h = x * rstd[:, None]
        else:
            h = (x - mean[:, None]) * rstd[:, None]
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
            mean, rstd, gh, g_mean = _row_sums(next_x, next_dy, w_ptr, offs_n, N, eps, offset, IS_RMS, FILLED)
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
    dy_ptr,
    ds_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    eps,
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
        centre = 0.0
        if not IS_RMS:  # the row is longer than a chunk
            centre = tl.sum(tl.load(x_ptr + row + tl.arange(0, CHUNK)).to(tl.float32), axis=0) / CHUNK
        totals = tl.zeros([CHUNK], tl.float32)
        squares = tl.zeros([CHUNK], tl.float32)
        gs = tl.zeros([CHUNK], tl.float32)
        gxs = tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, N, CHUNK, num_stages=STAGES):
            offs_c = start + tl.arange(0, CHUNK)
            mask = offs_c < N
            x = tl.load(x_ptr + row + offs_c, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(dy_ptr + row + offs_c, mask=mask, other=0.0).to(tl.float32)
            if w_ptr is not None:
                g *= tl.load(w_ptr + offs_c, mask=mask, other=0.0).to(tl.float32) + offset
            if not IS_RMS:
                x = tl.where(mask, x - centre, 0.0)
                totals += x
                gs += g
            squares += x * x
            gxs += g * x
        square, gx = tl.reduce((squares, gxs), 0, _add_pairs)
        square /= N
        g_mean = 0.0
        if not IS_RMS:
            moved, g_sum = tl.reduce((totals, gs), 0, _add_pairs)
            moved /= N
            centre += moved
            square = tl.maximum(square - moved * moved, 0.0, propagate_nan=tl.PropagateNan.ALL)
            gx -= moved * g_sum
            g_mean = g_sum / N
        rstd = 1.0 / tl.sqrt(square + eps)
        h = (tl.load(x_ptr + row + offs_n, mask=in_row, other=0.0).to(tl.float32) - centre) * rstd
        dy = tl.load(dy_ptr + row + offs_n, mask=in_row, other=0.0).to(tl.float32)
        dx = dy
        if w_ptr is not None:
            dx *= tl.load(w_ptr + offs_n, mask=in_row, other=0.0).to(tl.float32) + offset
        dx = rstd * (dx - g_mean - h * (gx / N * rstd))
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


@triton.jit
def _sum_shares(shares_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        offs = offs_p[:, None].to(tl.int64) * N + offs_n[None, :]  # [BLOCK_P, BLOCK_N]
        total += tl.load(shares_ptr + offs, mask=(offs_p < P)[:, None] & (offs_n < N)[None, :], other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _norm_bwd_sum(
    shares_ptr, out_ptr, more_shares_ptr, more_out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[N] = the sum of shares [P, N], for dw and, where both are wanted, db, by programs of its own."""
    if tl.program_id(1) == 0:
        _sum_shares(shares_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
    if more_out_ptr is not None:  # noqa: SIM102  settled when compiled
        if tl.program_id(1) == 1:
            _sum_shares(more_shares_ptr, more_out_ptr, P, N, BLOCK_P, BLOCK_N)


SHARES, COLUMNS = 512, 16  # at most so many shares, of so many columns, does a program add up at a time
EVERY = 2**31 - 1  # programs: one for each tile
WAVE = 132  # programs: one for each of an H200's multiprocessors
WARP = 32  # threads
SHARED = 200 * 1024  # bytes that pipelined tiles may take


def _rows(N: int, elements: int, per_thread: int, resident: int = 0, stages: int = 1, **more: Any) -> Config:
    """Whole rows, about so many elements a program: one for each such tile, or what fills so many resident warps."""
    rows = max(1, elements // N)
    warps = min(32, max(1, rows * N // (32 * per_thread)))
    programs = WAVE * max(1, resident // warps) if resident else EVERY
    return {"PROGRAMS": programs, "BLOCK_M": rows, "BLOCK_N": N, "STAGES": stages, "num_warps": warps, **more}


def _chunks(chunk: int, warps: int) -> Config:
    """Forward by chunks of a row."""
    return {"PROGRAMS": EVERY, "CHUNK": chunk, "STAGES": 3, "num_warps": warps}


def _columns(N: int, block: int, chunk: int, warps: int) -> Config:
    """Backward by blocks of columns."""
    programs = max(1, WAVE * max(1, 16 // warps) * block // N)
    return {"PROGRAMS": programs, "BLOCK_N": block, "CHUNK": chunk, "STAGES": 3, "num_warps": warps}


def _default(op: str, direction: str, size: int, N: int) -> Config:
    if direction == "forward":
        return _rows(N, 2048, 16, HELD=N <= 8192) if N <= LONGEST_ROW else _chunks(8192, 16)
    if N <= 8192:
        return _rows(N, 2048, 16, resident=16, AHEAD=N > 4096)
    return _columns(N, min(N, 16384 if "rms" in op else 8192), 4096, 16)


def _choices(op: str, direction: str, size: int, N: int) -> list[Config]:
    found = []
    if direction == "forward":
        if N <= LONGEST_ROW:
            held = N <= 8192
            found += [_rows(N, elements, per, HELD=held) for elements in (1024, 2048, 4096) for per in (8, 16, 32)]
            found += [_rows(N, 4096, 16, 32, stages, HELD=held) for stages in (1, 2, 3)]
            found += [_rows(N, 2048, 16, HELD=not held)]
        if N > 8192:
            found += [_chunks(4096, 8), _chunks(4096, 16), _chunks(8192, 16), _chunks(8192, 32)]
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
    fits = [c for c in found if (c["STAGES"] - 1) * c.get("BLOCK_M", 0) * N * size * 4 <= SHARED]
    return [c for i, c in enumerate(fits) if c not in fits[:i]]


CONFIG = Tuned("norm.json", _default, _choices)


def _op(is_add: bool, is_rms: bool) -> str:
    return ("add_" if is_add else "") + ("rms_norm" if is_rms else "layer_norm")


CUDA = Source(  # a few of the many instances; each is compiled when it is first called
    "norm.cu",
    "norm_fwd<T, T, 4, true, false>",
    "norm_fwd<T, float, 2, false, true>",
    "norm_bwd<T, T, 2, true, false>",
    "norm_bwd<T, float, 1, false, true>",
)
PACK = 16  # bytes of an access
LARGEST_CLUSTER = 8  # blocks
LARGEST_BLOCK = {  # threads, by packs a thread; as in norm.cu
    "forward": {1: 512, 2: 512, 4: 256, 8: 512},
    "backward": {1: 512, 2: 512},
}
RESIDENT = {1: 1024, 2: 512}  # threads that backward's registers let a multiprocessor have, by packs a thread
CLUSTERED = 128  # multiprocessors that clusters are sure to fill: an H200 has them in groups of 16 and of 18
WINS = {  # elements of rows, from and to, with which "cuda" beats "triton" on an H200
    ("forward", "rms_norm"): (8192, 8192),
    ("forward", "layer_norm"): (4096, 8192),
    ("backward", "rms_norm"): (1024, 32768),
    ("backward", "layer_norm"): (1024, 32768),
}


def _cluster(direction: str, each: int, blocks: int) -> Config:
    """A row held by so many blocks, so many packs a thread."""
    resident = {"resident": RESIDENT[each]} if direction == "cuda-backward" else {}
    return {"each": each, "blocks": blocks, **resident}


def _cluster_choices(op: str, direction: str, size: int, packs: int) -> list[Config]:
    """Largest blocks last."""
    found = []
    for each, largest in LARGEST_BLOCK[direction.removeprefix("cuda-")].items():
        if direction == "cuda-forward" and each == 1 and packs > 512:  # too little for a thread to do
            continue
        fits = [n for n in (8, 4, 2, 1) if (64 if n == 1 else 128) <= packs // (each * n) <= largest]
        found += [_cluster(direction, each, blocks) for blocks in fits]
    if direction == "cuda-backward" and packs <= 256:  # fewer shares to add up
        found += [{**config, "resident": config["resident"] // 2} for config in found]
    return found or [_cluster(direction, 1, 1)]


def _cluster_default(op: str, direction: str, size: int, packs: int) -> Config:
    """Small blocks hide each other's waiting; large clusters wait long."""
    wanted = 4 if direction == "cuda-forward" else 2

    def distance(config: Config) -> float:
        threads = packs / (config["each"] * config["blocks"])
        return abs(math.log2(config["each"] / wanted)) + abs(math.log2(threads / 256))

    return min(_cluster_choices(op, direction, size, packs), key=distance)


CLUSTER = Tuned("norm.json", _cluster_default, _cluster_choices)


def _most_packs(direction: str) -> int:
    """That a block can hold."""
    return max(each * threads for each, threads in LARGEST_BLOCK[direction].items())


class Plan(NamedTuple):
    """A launch of norm.cu, for so many rows at a time."""

    kernel: str
    threads: int
    blocks: int
    programs: int


@planned
def _plan(
    dtype: torch.dtype,
    weights: torch.dtype,
    device: int,
    direction: str,
    N: int,
    is_add: bool,
    is_rms: bool,
    form: str,
) -> Plan | None:
    """How clusters take such rows, if they can and, for the best form, should."""
    packs, rest = divmod(N * dtype.itemsize, PACK)
    if form == "triton" or device < 0 or rest or torch.version.hip is not None or not is_installed():
        return None
    has_clusters = torch.cuda.get_device_capability(device)[0] >= 9
    if packs > _most_packs(direction) * (LARGEST_CLUSTER if has_clusters else 1):
        return None
    shortest, longest = WINS[direction, _op(False, is_rms)]
    if form == "best" and not (has_clusters and shortest <= N <= longest):
        return None
    key = (_op(is_add, is_rms), f"cuda-{direction}", dtype.itemsize, triton.next_power_of_2(packs))
    config = CLUSTER(device, *key) if has_clusters else _cluster(key[1], max(LARGEST_BLOCK[direction]), 1)
    each, blocks = config["each"], config["blocks"]
    kinds = ("T" if weights == dtype else "float", each, *("true" if kind else "false" for kind in (is_rms, is_add)))
    kernel = f"norm_{'fwd' if direction == 'forward' else 'bwd'}<T, {', '.join(map(str, kinds))}>"
    threads = WARP * triton.cdiv(packs, WARP * each * blocks)
    shared = config.get("resident", 0) // threads  # blocks of a multiprocessor
    multiprocessors = WAVE if 2 * shared % blocks == 0 else CLUSTERED
    return Plan(kernel, threads, blocks, max(1, multiprocessors * shared // blocks))


_launch_fwd = Launcher(_norm_fwd)
_launch_fwd_long = Launcher(_norm_fwd_long)
_launch_bwd = Launcher(_norm_bwd)
_launch_bwd_long = Launcher(_norm_bwd_long)
_launch_bwd_sum = Launcher(_norm_bwd_sum)


def _plan_for(x: Tensor, weights: Sequence[Tensor | None], others: Sequence[Tensor | None], *rest: Any) -> Plan | None:
    """The same for these tensors, which must be aligned."""
    given = next((w for w in weights if w is not None), x)
    plan = _plan(x.dtype, given.dtype, x.get_device(), *rest)
    tensors = (x, *weights, *others)
    return plan if plan and not any(t.data_ptr() % PACK for t in tensors if t is not None) else None


def _pointers(*tensors: Tensor | None) -> list[Tensor | int]:
    return [0 if t is None else t for t in tensors]


def _config(x: Tensor, N: int, direction: str, is_add: bool, is_rms: bool) -> tuple[int, Config]:
    """How many programs at most, and the kernel's constants."""
    key = (_op(is_add, is_rms), direction, x.element_size(), triton.next_power_of_2(N))
    config = {"IS_RMS": is_rms, **CONFIG(x, *key)}
    if "CHUNK" not in config:
        config["FILLED"] = config["BLOCK_N"] == N
    return config.pop("PROGRAMS"), config


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
) -> tuple[Tensor, Any]:
    is_add = residual is not None
    y, total = contiguous_like(x), contiguous_like(x) if is_add else None
    M = x.numel() // max(1, N)
    if not M:
        return y, total
    x, residual, weight, bias = _contiguous(x, residual, weight, bias)
    tensors = (x, residual, weight, bias, y, total)
    plan = _plan_for(x, (weight, bias), (residual,), "forward", N, is_add, is_rms, form)
    if plan:
        numbers = (N, float(eps), float(offset))
        CUDA.launch(plan.kernel, x.dtype, (M,), plan.threads, *_pointers(*tensors), *numbers, cluster=plan.blocks)
        return y, total
    programs, config = _config(x, N, "forward", is_add, is_rms)
    if "CHUNK" in config:
        _launch_fwd_long((M,), *tensors, N, eps, offset, **config)
    else:
        programs = min(programs, triton.cdiv(M, config["BLOCK_M"]))
        _launch_fwd((programs,), *tensors, M, N, eps, offset, **config)
    return y, total


def _gradients_like(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    wanted = (True, *rest[-1])
    return [contiguous_like(t) for t, is_wanted in zip((x, weight, bias), wanted, strict=True) if is_wanted]  # type: ignore[arg-type]


@operator("normalize_backward", fake=_gradients_like)
def normalize_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    dsum: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradient of x and, as far as they are wanted, those of weight and bias."""
    gradients = _gradients_like(x, weight, bias, wanted)
    M = x.numel() // max(1, N)
    if not M:
        return [g.zero_() for g in gradients]
    x, weight, dy, dsum = _contiguous(x, weight, dy, dsum)
    is_add = dsum is not None
    plan = _plan_for(x, (weight, bias), (dy, dsum), "backward", N, is_add, is_rms, form)
    programs, config = (plan.programs, {}) if plan else _config(x, N, "backward", is_add, is_rms)
    programs = min(programs, triton.cdiv(M, config.get("BLOCK_M", 1)))
    shares = [x.new_empty((programs, N), dtype=torch.float32) if is_wanted else None for is_wanted in wanted]
    tensors = (x, weight, dy, dsum, gradients[0], *shares)
    if plan:
        numbers = (M, N, float(eps), float(offset))
        how = {"cluster": plan.blocks}
        CUDA.launch(plan.kernel, x.dtype, (programs,), plan.threads, *_pointers(*tensors), *numbers, **how)
    elif "CHUNK" in config:
        grid = (triton.cdiv(N, config["BLOCK_N"]), programs)
        _launch_bwd_long(grid, *tensors, M, N, eps, offset, **config)
    else:
        # Fused to dy * w - mean(dy * w), a difference that should be nothing would keep the product's rounding.
        _launch_bwd((programs,), *tensors, M, N, eps, offset, **config, enable_fp_fusion=is_rms)
    if any(wanted):
        sums = [*zip((s for s in shares if s is not None), gradients[1:], strict=True), (None, None)][:2]
        tile = min(SHARES, triton.next_power_of_2(programs))
        columns = COLUMNS if N > 2048 else COLUMNS // 2  # so that there are programs enough
        grid = (triton.cdiv(N, columns), sum(wanted))
        _launch_bwd_sum(grid, *sums[0], *sums[1], programs, N, BLOCK_P=tile, BLOCK_N=columns, num_warps=8)
    return gradients


def _gradients_in_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, dsum: Tensor | None, N: int, *rest: Any
) -> list[Tensor]:
    """The same written out, for torch to differentiate again."""
    eps, offset, is_rms, _, wanted = rest
    wide, dy = x.float().view(-1, N), dy.float().reshape(-1, N)
    if not is_rms:
        wide = wide - wide.mean(1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    normed = wide * rstd
    g = dy if weight is None else dy * (weight.float().reshape(N) + offset)
    dx = g - normed * (g * normed).mean(1, keepdim=True)
    dx = rstd * (dx if is_rms else dx - g.mean(1, keepdim=True))
    gradients = [dx if dsum is None else dx + dsum.float().reshape(-1, N)]
    gradients += [(dy * normed).sum(0)] if wanted[0] else []
    gradients += [dy.sum(0)] if wanted[1] else []
    likes = [like for like, is_wanted in zip((x, weight, bias), (True, *wanted), strict=True) if is_wanted]
    return [g.view(like.shape).to(like.dtype) for g, like in zip(gradients, likes, strict=True)]  # type: ignore[union-attr]


def _gradients(ctx: Any, dy: Tensor, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of x, weight and bias."""
    wanted = ctx.needs_input_grad[-7:-5]
    compute = _gradients_in_torch if torch.is_grad_enabled() else normalize_backward
    dx, *rest = compute(*ctx.saved_tensors, dy, dsum, *ctx.rest, wanted)
    return dx, *(rest.pop(0) if is_wanted else None for is_wanted in wanted)


@operator("normalize", fake=contiguous_like)
def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, eps: float, offset: float, is_rms: bool, form: str
) -> Tensor:
    """rms_norm or layer_norm of runs of N elements, times offset + weight, by the named form; layer_norm plus bias."""
    return _forward(x, None, weight, bias, N, eps, offset, is_rms, form)[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dy, None), None, None, None, None, None


normalize.differentiate(_save, _backward)


@operator("add_normalize", fake=lambda x, *_: (contiguous_like(x), contiguous_like(x)))
def add_normalize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
) -> tuple[Tensor, Tensor]:
    """The same of x + residual, and that sum."""
    return _forward(x, residual, weight, bias, N, eps, offset, is_rms, form)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, bias, *ctx.rest = inputs
    ctx.save_for_backward(output[1], weight, bias)
    ctx.set_materialize_grads(False)


def _backward_sum(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
    dx, dw, db = (dsum, None, None) if dy is None else _gradients(ctx, dy, dsum)
    return dx, dx, dw, db, None, None, None, None, None


add_normalize.differentiate(_save_sum, _backward_sum)


def fits_a_cluster(x: Tensor) -> bool:
    """Whether clusters can hold the rows of x in either direction."""
    packs, rest = divmod(x.shape[-1] * x.element_size(), PACK)
    return not rest and 0 < packs <= _most_packs("backward") * LARGEST_CLUSTER


def takes(smallest: int, shape: Any, inputs: Sequence[Any], weights: Sequence[Any]) -> bool:
    """Whether our kernels can take these as torch would: weights of the inputs' dtype or in fp32, shapes that fit."""
    if not all(isinstance(t, Tensor) for t in inputs) or not isinstance(shape, tuple | list) or not shape:
        return False
    first, given = inputs[0], [w for w in weights if w is not None]
    return (
        first.numel() >= smallest
        and all(isinstance(w, Tensor) and w.shape == torch.Size(shape) for w in given)
        and first.shape[-len(shape) :] == torch.Size(shape)
        and runs_here(*inputs)
        and (not given or (runs_here(*given) and given[0].device == first.device))
        and all(w.dtype in (first.dtype, torch.float32) for w in given)
    )


def require_alike(input: Any, residual: Any) -> None:
    """Raise unless the two can be added as they are."""
    for name, given in (("input", input), ("residual", residual)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(input, what), getattr(residual, what)
        if ours != theirs:
            raise ValueError(f"residual must have the {what} of input: {theirs} is not {ours}")
