"""What reductions share: kernels over rows, pieces of rows and columns, their gradients, and which a shape takes.

A reduction is a term of each element, a way to put terms together, and what is made of the last one: a norm is the root
of a sum of squares. Reading the input once is all the work, so what matters is that every multiprocessor always has
loads in flight. Short rows: several to a program, as a tile. Long rows: each is cut into pieces where there are few of
them, and a second kernel puts the pieces together. A dimension that is not the last is reduced in columns, without a
copy. No atomics, and shapes alone decide the order: the same input always gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tilewright.ops._dispatch import runs_here
from tilewright.ops._launch import Launcher
from tilewright.ops._numba import numba_cuda
from tilewright.ops._operator import contiguous_like, operator
from tilewright.ops._tuned import Config, Tuned, planned
from tilewright.spec import Cost, points

PROGRAMS = 4224  # 32 for each of an H200's 132 multiprocessors
LONGEST_TILE = 8192  # elements of a row that one program takes whole
EVERY = 2**31 - 1  # programs: one for each tile
COLUMN_TILE = 8192  # elements of columns that one program takes at a time
LONGEST_KEY = 65536  # elements: rows of more are configured alike
GROUPED = ("index", "logsumexp")  # whose steps cost more than a load, unless they take neighbours together
SPREAD_TILE = 4096  # elements of a gradient that one program writes


LOG2_E = tl.constexpr(math.log2(math.e))


class Kind(NamedTuple):
    """A reduction, as its kernels know it."""

    how: str  # terms are put together: sum, prod, max, index, logsumexp, var
    term: str = "x"
    last: str = "x"  # what is made of the result

    @property
    def has_two(self) -> bool:
        """Whether two numbers stand for a piece."""
        return self.how in ("index", "logsumexp", "var")


KINDS = {
    "sum": Kind("sum"),
    "mean": Kind("sum", last="mean"),
    "prod": Kind("prod"),
    "amax": Kind("max"),
    "amin": Kind("max", "negated", "negated"),
    "argmax": Kind("index", last="none"),
    "argmin": Kind("index", "negated", "none"),
    "max": Kind("index"),  # with its index
    "min": Kind("index", "negated", "negated"),
    "norm0": Kind("sum", "nonzero"),
    "norm1": Kind("sum", "abs"),
    "norm2": Kind("sum", "square", "sqrt"),
    "normp": Kind("sum", "power", "root"),
    "norminf": Kind("max", "abs"),
    "norm-inf": Kind("max", "-abs", "negated"),
    "logsumexp": Kind("logsumexp"),
    "var": Kind("var"),
    "zeros": Kind("sum", "zero"),  # for the gradient of prod: how many, and the product of the others
    "prod of nonzeros": Kind("prod", "one for zero"),
}
OF_ITSELF = ("sum", "mean", "logsumexp", "norm1", "norm2", "normp")  # of groups it is that of all, with its gradient


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _neutral(HOW: tl.constexpr):
    """What changes no result."""
    if HOW == "prod":
        return 1.0
    elif HOW == "sum" or HOW == "var":
        return 0.0
    else:
        return -float("inf")


@triton.jit
def _finite(m):
    """What maxima are taken off by: an infinite one would leave NaN of what is equal to it."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def _term(x, p, TERM: tl.constexpr):
    x = x.to(tl.float32)
    if TERM == "negated":
        x = -x
    elif TERM == "abs":
        x = tl.abs(x)
    elif TERM == "-abs":
        x = -tl.abs(x)
    elif TERM == "square":
        x = x * x
    elif TERM == "power":
        x = libdevice.pow(tl.abs(x), p)
    elif TERM == "nonzero":
        x = tl.where(x != 0.0, 1.0, 0.0)
    elif TERM == "zero":
        x = tl.where(x == 0.0, 1.0, 0.0)
    elif TERM == "one for zero":
        x = tl.where(x == 0.0, 1.0, x)
    return x


@triton.jit
def _step(a, b, c, x, place, inside, HOW: tl.constexpr, MASKED: tl.constexpr):
    """Put the terms x to what each lane holds: a, and b and c where one number is not enough."""
    if HOW == "sum":
        a += tl.where(inside, x, 0.0) if MASKED else x
    elif HOW == "prod":
        a *= tl.where(inside, x, 1.0) if MASKED else x
    elif HOW == "var":  # mean, sum of squared distances from it, count
        x = tl.where(inside, x, a) if MASKED else x
        c += tl.where(inside, 1.0, 0.0) if MASKED else 1.0
        apart = x - a
        a += apart / tl.maximum(c, 1.0)
        b += apart * (x - a)
    else:
        x = tl.where(inside, x, -float("inf")) if MASKED else x
        if HOW == "max":
            a = _larger(a, x)
        elif HOW == "index":  # maximum and its place; the first of equals, and NaN before all
            is_better = ~(x <= a) & (a == a)
            a = tl.where(is_better, x, a)
            b = tl.where(is_better, place, b)
        else:  # logsumexp: maximum and the sum of exp(x - maximum), by one exp an element
            apart = tl.where(x == a, 0.0, x - a)
            e = tl.exp(-tl.abs(apart))
            b = tl.where(apart > 0.0, b * e + 1.0, b + e)
            a = tl.maximum(a, x)
    return a, b, c


@triton.jit
def _step_by_groups(a, b, c, x, place, inside, HOW: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr):
    """The same for neighbours that one thread holds, together: a lane is a group, and an index that of its first."""
    if GROUP == 1:
        return _step(a, b, c, x, place, inside, HOW, MASKED)
    else:
        x = tl.where(inside, x, -float("inf")) if MASKED else x
        x = tl.reshape(x, [1, x.shape[1] // GROUP, GROUP])
        largest = tl.reduce(x, 2, _larger)
        if HOW == "index":
            is_better = ~(largest <= a) & (a == a)
            return tl.where(is_better, largest, a), tl.where(is_better, place, b), c
        else:
            m = tl.maximum(a, largest)
            shift = _finite(m) * LOG2_E
            e = tl.sum(tl.exp2(x * LOG2_E - shift[:, :, None]), axis=2)
            return m, b * tl.exp2(a * LOG2_E - shift) + e, c


@triton.jit
def _fold(a, b, c, HOW: tl.constexpr, FARTHEST: tl.constexpr = 2**31 - 1):
    """The lanes of each row [BLOCK_M, BLOCK_N] as one. For index b is the place, for var c the count."""
    if HOW == "sum":
        a = tl.sum(a, axis=1)
        b = a
    elif HOW == "prod":
        a = tl.reduce(a, 1, _times)
        b = a
    elif HOW == "max":
        a = tl.reduce(a, 1, _larger)
        b = a
    elif HOW == "index":
        best = tl.reduce(a, 1, _larger)
        is_best = (a == best[:, None]) | (a != a)
        b = tl.min(tl.where(is_best, b, FARTHEST), axis=1)
        a = best
    elif HOW == "logsumexp":
        m = tl.max(a, axis=1)
        b = tl.sum(b * tl.exp2((a - _finite(m)[:, None]) * LOG2_E), axis=1)
        a = m
    else:
        mean = tl.sum(a * c, axis=1) / tl.sum(c, axis=1)
        apart = a - mean[:, None]
        b = tl.sum(b + c * apart * apart, axis=1)
        a = mean
    return a, b


@triton.jit
def _place_in_group(x_ptr, starts, N, a, b, TERM: tl.constexpr, GROUP: tl.constexpr):
    """Which element of its group, whose first is b, is the extreme a: groups are read again, from the cache."""
    places = b[:, None] + tl.arange(0, GROUP)[None, :]
    x = _term(tl.load(x_ptr + starts[:, None] + places, mask=places < N, other=0.0), 0.0, TERM)
    is_it = (places < N) & ((x == a[:, None]) | (x != x))
    return tl.min(tl.where(is_it, places, 2**31 - 1), axis=1)


@triton.jit
def _write(y_ptr, z_ptr, a, b, offs, mask, N, p, HOW: tl.constexpr, LAST: tl.constexpr):
    """Of a piece what it holds, of a whole row the result. For var p is the correction."""
    if LAST == "piece":
        tl.store(y_ptr + offs, a, mask=mask)
        if HOW == "index" or HOW == "logsumexp" or HOW == "var":
            tl.store(z_ptr + offs, b, mask=mask)
    else:
        if HOW == "index":
            tl.store(z_ptr + offs, b, mask=mask)
        if HOW == "logsumexp":
            a += tl.log(b)
        if HOW == "var":
            a = b / tl.maximum((N + 0.0) - p, 0.0)
        if LAST == "mean":
            a = a / (N + 0.0)
        elif LAST == "sqrt":
            a = tl.sqrt_rn(a)
        elif LAST == "root":
            a = libdevice.pow(a, 1.0 / p)
        elif LAST == "negated":
            a = -a
        if LAST != "none":
            tl.store(y_ptr + offs, a.to(y_ptr.dtype.element_ty), mask=mask)  # pyright: ignore[reportOptionalMemberAccess]


@triton.jit
def _reduce_tile(
    x_ptr, y_ptr, z_ptr, M, N, p,
    HOW: tl.constexpr, TERM: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whole rows, BLOCK_M at a time."""
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may pass 2**31
        inside = (offs_m < M)[:, None] & (offs_n < N)
        x = tl.load(x_ptr + offs_m[:, None] * N + offs_n, mask=inside, other=0.0)
        a = tl.where(inside, _term(x, p, TERM), _neutral(HOW))
        count = tl.where(inside, 1.0, 0.0)
        if HOW == "index":
            a = tl.reduce(tl.reshape(a, [BLOCK_M, BLOCK_N // GROUP, GROUP]), 2, _larger)
            b = tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP + tl.zeros([BLOCK_M, BLOCK_N // GROUP], tl.int32)
        else:
            b = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if HOW == "logsumexp":
            m = tl.max(a, axis=1)
            b = tl.sum(tl.exp2(a * LOG2_E - (_finite(m) * LOG2_E)[:, None]), axis=1)
            a = m
        else:
            a, b = _fold(a, b, count, HOW)
        if HOW == "index":
            rows = tl.minimum(offs_m, M - 1)  # there is none to read beyond
            b = _place_in_group(x_ptr, rows * N, N, a, b, TERM, GROUP)
        _write(y_ptr, z_ptr, a, b, offs_m, offs_m < M, N, p, HOW, LAST)


@triton.jit
def _reduce_long(
    x_ptr, y_ptr, z_ptr, N, chunk, p,
    HOW: tl.constexpr, TERM: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A piece of a row, or all of it."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    begin = row * N + piece * chunk
    end = row * N + tl.minimum((piece + 1) * chunk, N)
    # A row of any length: from the first multiple of 16 on, accesses are 16 bytes wide.
    first = tl.multiple_of((begin + 15) // 16 * 16, 16)
    rest = first + tl.maximum(end - first, 0) // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    lanes = tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP
    a = tl.full([1, BLOCK_N // GROUP], _neutral(HOW), tl.float32)
    b = tl.zeros([1, BLOCK_N // GROUP], tl.int32 if HOW == "index" else tl.float32)
    c = tl.zeros([1, BLOCK_N // GROUP], tl.float32)
    if begin < first:
        inside = offs_n < tl.minimum(first, end) - begin
        x = tl.load(x_ptr + begin + offs_n, mask=inside, other=0.0)
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), lanes, inside, HOW, True, GROUP)
    for start in range(first, rest, BLOCK_N):
        x = tl.load(x_ptr + start + offs_n)
        place = (start - begin).to(tl.int32) + lanes
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), place, True, HOW, False, GROUP)
    if rest < end:
        inside = offs_n < end - rest
        x = tl.load(x_ptr + rest + offs_n, mask=inside, other=0.0)
        place = (rest - begin).to(tl.int32) + lanes
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), place, inside, HOW, True, GROUP)
    a, b = _fold(a, b, c, HOW)
    if HOW == "index":
        b = _place_in_group(x_ptr, begin + tl.zeros([1], tl.int64), end - begin, a, b, TERM, GROUP)
        b = piece * chunk + b
    offs = row * tl.num_programs(1) + piece + tl.arange(0, 1)
    _write(y_ptr, z_ptr, a, b, offs, None, N, p, HOW, LAST)


@triton.jit
def _reduce_columns(
    x_ptr, y_ptr, z_ptr, N, inner, tiles, chunk, p,
    HOW: tl.constexpr, TERM: tl.constexpr, LAST: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A piece of BLOCK_I columns of [N, inner], or all of them."""
    program = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    outer = program // tiles
    offs_i = program % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    x_ptr += outer * N * inner + offs_i[:, None]
    a = tl.full([BLOCK_I, BLOCK_N], _neutral(HOW), tl.float32)
    b = tl.zeros([BLOCK_I, BLOCK_N], tl.int32 if HOW == "index" else tl.float32)
    c = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    length = (tl.minimum((piece + 1) * chunk, N) - piece * chunk).to(tl.int32)
    x_ptr += piece * chunk * inner
    for start in range(0, length, BLOCK_N):
        n = start + offs_n
        inside = (offs_i < inner)[:, None] & (n < length)
        x = tl.load(x_ptr + n.to(tl.int64) * inner, mask=inside, other=0.0)
        a, b, c = _step(a, b, c, _term(x, p, TERM), n, inside, HOW, True)
    a, b = _fold(a, b, c, HOW)
    if HOW == "index":
        b = piece * chunk + b
    offs = (outer * inner + offs_i) * tl.num_programs(1) + piece
    _write(y_ptr, z_ptr, a, b, offs, offs_i < inner, N, p, HOW, LAST)


@triton.jit
def _reduce_pieces(
    a_ptr, b_ptr, y_ptr, z_ptr, M, N, pieces, chunk, p,
    HOW: tl.constexpr, TWO: tl.constexpr, LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the pieces [M, pieces] of rows of N hold, put together."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    offs = offs_m[:, None] * pieces + offs_n
    inside = (offs_m < M)[:, None] & (offs_n < pieces)
    a = tl.load(a_ptr + offs, mask=inside, other=_neutral(HOW))
    count = a
    if HOW == "var":
        length = tl.minimum((offs_n + 1) * chunk, N) - offs_n * chunk
        count = tl.where(offs_n < pieces, length, 0).to(tl.float32) + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b = a
    if TWO:
        b = tl.load(b_ptr + offs, mask=inside, other=0)
    a, b = _fold(a, b, count, HOW, 2**63 - 1)
    _write(y_ptr, z_ptr, a, b, offs_m, offs_m < M, N, p, HOW, LAST)


@triton.jit
def _reduce_bwd(
    x_ptr, y_ptr, dy_ptr, e_ptr, f_ptr, dx_ptr, M, N, inner, tiles, p,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of each element of x [M, N, inner] from its row's result y, the gradient of that, and e and f."""
    blocks = tl.cdiv(N, BLOCK_N)
    program = (tl.program_id(0) // blocks).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if inner == 1:  # BLOCK_M rows
        offs_m = program * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = offs_m < M
        offs = offs_m[:, None] * N + offs_n
    else:  # BLOCK_M columns
        offs_i = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = offs_i < inner
        offs_m = program // tiles * inner + offs_i
        offs = program // tiles * N * inner + offs_n * inner + offs_i[:, None]
    inside = is_row[:, None] & (offs_n < N)
    x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs_m, mask=is_row, other=0.0).to(tl.float32)[:, None]
    dy = tl.load(dy_ptr + offs_m, mask=is_row, other=0.0).to(tl.float32)[:, None]
    sign = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    if KIND == "logsumexp":
        dx = dy * tl.exp(x - y)
    elif KIND == "norm1":
        dx = dy * sign
    elif KIND == "norm2":
        dx = tl.where(y == 0.0, 0.0, x * (dy / y))
    elif KIND == "normp":
        slope = tl.where(y == 0.0, 0.0, dy / libdevice.pow(y, p - 1.0))
        dx = tl.where(x == 0.0, 0.0, sign * libdevice.pow(tl.abs(x), p - 1.0) * slope)
    else:
        e = tl.load(e_ptr + offs_m, mask=is_row, other=0.0)[:, None]
        if KIND == "var":  # e: the mean
            dx = 2.0 * dy / (N - p) * (x - e)
        elif KIND == "prod":  # e: the product of what is not zero, f: how many are
            f = tl.load(f_ptr + offs_m, mask=is_row, other=0.0)[:, None]
            others = tl.where(f == 0.0, e / tl.where(x == 0.0, 1.0, x), tl.where((f == 1.0) & (x == 0.0), e, 0.0))
            dx = dy * others
        elif KIND == "amax" or KIND == "amin":  # e: how many are equal to the result
            dx = tl.where(x == y, dy / e, dy * 0.0)
        else:  # the greatest or smallest norm
            dx = sign * tl.where(tl.abs(x) == y, dy / e, dy * 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def split(M: int, N: int, block: int) -> tuple[int, int]:
    """The length of the pieces that programs take of a row of N, and their number.

    Shapes alone decide, so that the order of summation, and with it every bit of the result, is always the same.
    """
    if M >= PROGRAMS // 4:  # the rows are enough to fill the GPU
        return N, 1
    blocks = triton.cdiv(N, block)
    each = triton.cdiv(M * blocks, PROGRAMS)
    return each * block, triton.cdiv(blocks, each)


def _warps(elements: int, each: int) -> int:
    """How many, where a thread takes `each` elements at a time."""
    return min(32, max(4, triton.next_power_of_2(elements) // (32 * each)))


def _tile_default(form: str, how: str, size: int, block: int) -> Config:
    rows = max(1, 8192 // block) if block < 1024 else max(1, 4096 // block)
    return {"BLOCK_M": rows, "BLOCK_N": block, "programs": EVERY, "num_warps": 8}


def _tile_choices(form: str, how: str, size: int, block: int) -> list[Config]:
    found = {}
    for tile in (4096, 8192, 16384):
        rows = max(1, tile // block)
        for each in (16, 32):
            for programs in (PROGRAMS, EVERY):
                warps = _warps(rows * block, each)
                config = {"BLOCK_M": rows, "BLOCK_N": block, "programs": programs, "num_warps": warps}
                found[rows, warps, programs] = config
    return list(found.values())


def _long_default(form: str, how: str, size: int, length: int) -> Config:
    if length < 16384:
        return {"BLOCK_N": length // 4, "num_warps": max(1, length // 2048)}
    return {"BLOCK_N": 4096 if how in GROUPED else 8192, "num_warps": 8}


def _long_choices(form: str, how: str, size: int, length: int) -> list[Config]:
    blocks = [n for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= length // 2]
    found = [(n, n // (32 * each)) for n in blocks for each in (8, 16, 32)]
    return [{"BLOCK_N": n, "num_warps": warps} for n, warps in found if 1 <= warps <= 16]


def _columns_default(form: str, how: str, size: int, length: int, width: int) -> Config:
    block = min(length, COLUMN_TILE // min(64, width))
    return {"BLOCK_I": min(width, COLUMN_TILE // block), "BLOCK_N": block, "num_warps": 8}


def _columns_choices(form: str, how: str, size: int, length: int, width: int) -> list[Config]:
    found = {}
    for widest in (32, 64, 128, 256):
        for tile in (4096, 8192):
            for warps in (4, 8):
                block = min(length, tile // min(widest, width))
                i = min(width, max(widest, tile // block // 4))
                found[i, block, warps] = {"BLOCK_I": i, "BLOCK_N": block, "num_warps": warps}
    return list(found.values())


TILE = Tuned("reduce.json", _tile_default, _tile_choices)
LONG = Tuned("reduce.json", _long_default, _long_choices)
COLUMNS = Tuned("reduce.json", _columns_default, _columns_choices)

_tile_launch = Launcher(_reduce_tile)
_long_launch = Launcher(_reduce_long)
_columns_launch = Launcher(_reduce_columns)
_pieces_launch = Launcher(_reduce_pieces)
_bwd_launch = Launcher(_reduce_bwd)
Launch = Callable[..., None]  # of the tensors x, y, z


@planned
def _plan(outer: int, N: int, inner: int, dtype: torch.dtype, out: Any, device: int, name: str, p: float) -> Launch:
    """How x [outer, N, inner] becomes y, and z where there is an index."""
    kind, size = KINDS[name], dtype.itemsize
    how: Config = {"HOW": kind.how, "TERM": kind.term}
    group = 16 // size if kind.how in GROUPED else 1  # what a thread reads at once
    if inner == 1 and N <= LONGEST_TILE:
        config = dict(TILE(device, "tile", kind.how, size, max(group, triton.next_power_of_2(N))))
        programs = min(config.pop("programs"), triton.cdiv(outer, config["BLOCK_M"]))
        return _tile_launch.prepare((programs,), outer, N, p, **how, LAST=kind.last, GROUP=group, **config)
    if inner == 1:
        config = LONG(device, "long", kind.how, size, min(LONGEST_KEY, triton.next_power_of_2(N)))
        how["GROUP"] = group
        chunk, pieces = split(outer, N, config["BLOCK_N"])
        launcher, grid, given = _long_launch, (outer, pieces), (N, chunk, p)
    else:
        length, width = (triton.next_power_of_2(min(n, most)) for n, most in ((N, COLUMN_TILE), (inner, 1024)))
        config = COLUMNS(device, "columns", kind.how, size, length, width)
        tiles = triton.cdiv(inner, config["BLOCK_I"])
        chunk, pieces = split(outer * tiles, N, config["BLOCK_N"])
        launcher, grid, given = _columns_launch, (outer * tiles, pieces), (N, inner, tiles, chunk, p)
    if pieces == 1:
        return launcher.prepare(grid, *given, **how, LAST=kind.last, **config)
    cut = launcher.prepare(grid, *given, **how, LAST="piece", **config)
    M = outer * inner
    block = triton.next_power_of_2(pieces)
    rows = max(1, 4096 // block)
    put_together = _pieces_launch.prepare(
        (triton.cdiv(M, rows),), M, N, pieces, chunk, p,
        HOW=kind.how, TWO=kind.has_two, LAST=kind.last, BLOCK_M=rows, BLOCK_N=block, num_warps=_warps(rows * block, 16),
    )  # fmt: skip

    def launch(x: Tensor, y: Tensor, z: Tensor) -> None:
        a = torch.empty(M, pieces, dtype=torch.float32, device=x.device)
        b = a
        if kind.has_two:
            b = torch.empty(M, pieces, dtype=torch.int64 if kind.how == "index" else torch.float32, device=x.device)
        cut(x, a, b)
        put_together(a, b, y, z)

    return launch


def sum_pieces(a: Tensor, y: Tensor) -> None:
    """y [M] = the sums of the rows of a [M, pieces], each of which must fit into one program."""
    M, pieces = a.shape
    block = triton.next_power_of_2(pieces)
    config = {"HOW": "sum", "TWO": False, "LAST": "x", "BLOCK_M": 1, "BLOCK_N": block, "num_warps": _warps(block, 16)}
    _pieces_launch((M,), a, a, y, y, M, pieces, pieces, 1, 0.0, **config)


def sizes(shape: tuple[int, ...], first: int, end: int) -> tuple[int, int, int]:
    """Of the dimensions before, from `first` up to `end`, and after."""
    return math.prod(shape[:first]), math.prod(shape[first:end]), math.prod(shape[end:])


def _result_shape(shape: tuple[int, ...], first: int, end: int, keepdim: bool) -> tuple[int, ...]:
    return (*shape[:first], *([1] * (end - first) if keepdim else ()), *shape[end:])


def _run(x: Tensor, y: Tensor, z: Tensor, first: int, end: int, kind: str, p: float) -> None:
    outer, N, inner = sizes(x.shape, first, end)
    x = x.contiguous()
    _plan(outer, N, inner, x.dtype, y.dtype, x.get_device(), kind, p)(x, y, z)


def _empty(x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(_result_shape(x.shape, first, end, keepdim), dtype=dtype or x.dtype)


@operator("reduce", fake=_empty)
def reduce_forward(
    x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None
) -> Tensor:
    """The reduction of this kind over the dimensions from `first` up to `end`."""
    if x.numel() == 0:
        return torchs(x, first, end, keepdim, kind, p, dtype)
    y = _empty(x, first, end, keepdim, kind, p, dtype)
    _run(x, y, y, first, end, kind, p)
    return y


def _empty_index(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> Tensor:
    return x.new_empty(_result_shape(x.shape, first, end, keepdim), dtype=torch.int64)


@operator("reduce_index", fake=_empty_index)
def reduce_index(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> Tensor:
    """Where the extreme is, among the elements of the dimensions from `first` up to `end`."""
    z = _empty_index(x, first, end, keepdim, kind)
    if x.numel():
        _run(x, z, z, first, end, kind, 0.0)
    return z


def _empty_both(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> tuple[Tensor, Tensor]:
    shape = _result_shape(x.shape, first, end, keepdim)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@operator("reduce_with_index", fake=_empty_both)
def reduce_with_index(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> tuple[Tensor, Tensor]:
    """The extreme and where it is."""
    y, z = _empty_both(x, first, end, keepdim, kind)
    if x.numel():
        _run(x, y, z, first, end, kind, 0.0)
    return y, z


def torchs(x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None) -> Tensor:
    """The same by torch: of empty tensors, and for gradients of gradients."""
    shape = _result_shape(x.shape, first, end, keepdim)
    dtype = dtype or x.dtype
    x = x.flatten(first, end - 1)
    x = x.to(dtype) if dtype.itemsize > x.element_size() else x
    if kind.startswith("norm"):
        y = torch.linalg.vector_norm(x, p if kind == "normp" else float(kind.removeprefix("norm")), first)
    elif kind == "var":
        y = torch.var(x, first, correction=p)
    else:
        y = getattr(torch, kind)(x, first)
    return y.view(shape).to(dtype)


@planned
def _plan_backward(outer: int, N: int, inner: int, kind: str, p: float, dtypes: Any, device: int) -> Launch:
    if inner == 1:
        block = min(SPREAD_TILE, triton.next_power_of_2(N))
        width = SPREAD_TILE // block
        tiles = 1
        programs = triton.cdiv(outer, width)
    else:
        width = min(64, triton.next_power_of_2(inner))
        block = min(SPREAD_TILE // width, triton.next_power_of_2(N))
        tiles = triton.cdiv(inner, width)
        programs = outer * tiles
    grid = (programs * triton.cdiv(N, block),)  # a second axis could be too long
    blocks = {"BLOCK_M": width, "BLOCK_N": block, "num_warps": 4}
    return _bwd_launch.prepare(grid, outer, N, inner, tiles, p, KIND=kind, **blocks)


@operator("reduce_backward", fake=contiguous_like)
def reduce_backward(x: Tensor, y: Tensor, dy: Tensor, first: int, end: int, kind: str, p: float) -> Tensor:
    """The gradient of x from the result and its gradient."""
    dx = contiguous_like(x)
    if x.numel() == 0:
        return dx
    if kind == "norm0":
        return dx.zero_()
    x, y, dy = x.contiguous(), y.contiguous(), dy.contiguous()
    e = f = y
    if kind == "var":
        e = reduce_forward.function(x, first, end, False, "mean", 0.0, torch.float32)
    elif kind == "prod":
        e = reduce_forward.function(x, first, end, False, "prod of nonzeros", 0.0, torch.float32)
        f = reduce_forward.function(x, first, end, False, "zeros", 0.0, torch.float32)
    elif kind in ("amax", "amin", "norminf", "norm-inf"):
        best = y.view(_result_shape(x.shape, first, end, True))
        e = ((x if kind[0] == "a" else x.abs()) == best).sum(tuple(range(first, end)), dtype=torch.float32)
    dtypes = x.dtype, y.dtype, dy.dtype
    plan = _plan_backward(*sizes(x.shape, first, end), kind, p, dtypes, x.get_device())
    plan(x, y, dy, e, f, dx)
    return dx


def _save(ctx, inputs, output) -> None:
    x, *ctx.options = inputs
    ctx.shape = x.shape
    if ctx.options[3] in ("sum", "mean"):
        ctx.dtype = x.dtype
    else:
        ctx.save_for_backward(x, output)


def _backward(ctx, dy: Tensor):
    first, end, _, kind, p, _ = ctx.options
    nothing = [None] * len(ctx.options)
    if kind in ("sum", "mean"):
        N = math.prod(ctx.shape[first:end])
        dx = dy.reshape(_result_shape(ctx.shape, first, end, True))
        dx = dx.to(ctx.dtype) if kind == "sum" else (dx / N).to(ctx.dtype)
        return dx.expand(ctx.shape), *nothing
    x, y = ctx.saved_tensors
    if torch.is_grad_enabled() and kind != "norm0":  # gradients of gradients: torch differentiates its own again
        return torch.autograd.grad(torchs(x, *ctx.options), x, dy, create_graph=True)[0], *nothing
    return reduce_backward(x, y, dy, first, end, kind, p), *nothing


reduce_forward.differentiate(_save, _backward)


def _save_index(ctx, inputs, output) -> None:
    x, ctx.first, ctx.end, *_ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_index(ctx, dy: Tensor, _):
    (index,) = ctx.saved_tensors
    outer, N, inner = sizes(ctx.shape, ctx.first, ctx.end)
    zeros = dy.new_zeros(outer, N, inner)
    dx = zeros.scatter(1, index.view(outer, 1, inner), dy.reshape(outer, 1, inner))
    return dx.view(ctx.shape), None, None, None, None


reduce_with_index.differentiate(_save_index, _backward_index)


def takes(smallest: float, x: Any, dtype: Any = None) -> bool:
    """Whether our kernels can take the reduction of x as torch would; there is something to reduce."""
    return (
        isinstance(x, Tensor)
        and x.numel() >= max(1, smallest)
        and x.dim() > 0
        and runs_here(x)
        and dtype in (None, x.dtype, torch.float32)  # to a narrower one torch rounds before
    )


def named(x: Tensor, dim: Any) -> tuple[int, ...]:
    """The dimensions that `dim` names, sorted; none if it names no valid ones. None names all."""
    rank = x.dim()
    if dim is None:
        return tuple(range(rank))
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    if not all(type(d) is int and -rank <= d < rank for d in dims):
        return ()
    found = tuple(sorted(d % rank for d in dims))
    return found if len(set(found)) == len(found) else ()


def reduce(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, kind: str, p: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    """The reduction over any dimensions: in groups of those side by side, where that is the same, else as one."""
    first, end = dims[0], dims[-1] + 1
    if end - first == len(dims):
        return reduce_forward(x, first, end, keepdim, kind, p, dtype)
    others = [d for d in range(x.dim()) if d not in dims]
    if kind in OF_ITSELF:
        first = max(d for d in others if d < end) + 1
        y = reduce_forward(x, first, end, True, kind, p, torch.float32)
        y = reduce(y, tuple(d for d in dims if d < first), True, kind, p, dtype or x.dtype)
        return y if keepdim else y.view([x.shape[d] for d in others])
    y = reduce_forward(x.permute(*others, *dims), len(others), x.dim(), False, kind, p, dtype)
    return y.view([1 if d in dims else x.shape[d] for d in range(x.dim())]) if keepdim else y


def cost(x: Tensor) -> Cost:
    """Of a reduction over the last dimension."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(read=x.nbytes, written=rows * x.element_size(), flops={"fp32": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    """Of a gradient that is another for each element."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(read=x.nbytes + 2 * rows * x.element_size(), written=x.nbytes, flops={"fp32": 2 * x.numel()})


CHECK = points(
    M=(1, 3, 1, 5, 1, 3, 1, 3, 1061, 5003),
    N=(1, 1, 2, 193, 781, 4097, 300007, 20011, 67, 7),
)
BENCH = points(M=(1, 4096, 65536, 2**22), N=(2**28, 65536, 4096, 64))


NUMBA_THREADS = 128


@functools.cache
def numba_tree_sum() -> Any:
    """A Numba function: the sum of one value from each of the block's threads, for any number of threads."""
    global nb
    nb = numba_cuda()
    from numba import float32

    @nb.jit(device=True)
    def tree_sum(value):
        shared = nb.shared.array(1024, float32)
        lane, width = nb.threadIdx.x, nb.blockDim.x
        shared[lane] = value
        nb.syncthreads()
        while width > 1:  # the upper half onto the lower; of an odd width the middle one waits
            half = (width + 1) // 2
            if lane < width - half:
                shared[lane] += shared[lane + half]
            nb.syncthreads()
            width = half
        return shared[0]

    return tree_sum


@functools.cache
def numba_sum_chunks() -> Any:
    """A Numba kernel: out [M, chunks] = the sums of the pieces of the rows of x [M, N]."""
    global nb
    nb = numba_cuda()
    from numba import float32

    tree_sum = numba_tree_sum()

    @nb.jit
    def sum_chunks(x, out, chunk):
        row, piece = nb.blockIdx.x, nb.blockIdx.y
        end = min((piece + 1) * chunk, x.shape[1])
        total = float32(0)
        for n in range(piece * chunk + nb.threadIdx.x, end, nb.blockDim.x):
            total += x[row, n]
        total = tree_sum(total)
        if nb.threadIdx.x == 0:
            out[row, piece] = total

    return sum_chunks
