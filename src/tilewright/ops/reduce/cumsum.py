"""Cumulative sum over a dimension: y_n = x_1 + … + x_n.

A program scans short rows as a tile, a long row block by block, and columns row by row. Few long rows are split into
parts: each publishes its sum, waits for the sums before it, and reads its elements again from L2 (a decoupled look-back
whose order of summation is fixed, so results are deterministic). Parts of columns are summed by a kernel of their own.
The gradient is the same scan from the other end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.reduce._cases import CHECK
from tilewright.ops.reduce._operators import eligible_reduction, reduced_dims
from tilewright.ops.reduce._plans import (
    MAX_KEY,
    VECTOR,
    WARP,
    Layout,
    column_sizes,
    many_rows,
    plan_part_sums,
    split_columns,
)
from tilewright.ops.reduce._triton import column_vectors
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.crossovers import Crossover, always
from tilewright.runtime.eligibility import Dispatch, TensorKey, empty_like_options, has_elements
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Op, points

__all__ = ["cumsum"]

SCAN_PROGRAMS_PER_SM = 8  # one warp each, with many loads in flight
FEW_PROGRAMS_PER_SM = 4
MAX_ROW, MAX_ODD_ROW = 4096, 1024  # elements of a row that a program takes at once
ALIGNMENT = 16  # elements: blocks of longer rows start at multiples of it
GROUP = 256  # parts of a row that add up each other's sums


def reference(x: Tensor) -> Tensor:
    return torch.cumsum(x, dim=-1)


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops={"fp32": x.numel()})


op = Op(
    "cumsum",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=[case for case in CHECK if case["N"] != 300007],
    bench=points(M=(1, 16, 4096, 65536), N=(2**28, 2**24, 65536, 4096)),
    backward_cost=cost,
    batch="M",
    draws={"N": "row"},
)


@triton.jit
def _cumsum_rows(
    x_ptr, y_ptr, M, N, REVERSE: tl.constexpr, VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Scan BLOCK_M rows of N <= BLOCK_N, a multiple of VEC; REVERSE from their end."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    length = N // VEC * VEC  # so that the compiler knows
    in_bounds = (offs_m < M)[:, None] & (offs_n < length)
    offs = offs_m[:, None] * length + offs_n
    x = tl.load(x_ptr + offs, mask=in_bounds, other=0.0).to(tl.float32)
    y = tl.cumsum(x, axis=1, reverse=REVERSE)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit
def _word(x):
    """Pack a float and the flag that it is there into one word, which is written and read at once."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)


@triton.jit
def _sum_of_words(ptrs, mask):
    """Wait until all words are there; return the sum of their floats."""
    words = tl.load(ptrs, mask=mask, other=1 << 32, volatile=True)
    while tl.min(words) == 0:
        words = tl.load(ptrs, mask=mask, other=1 << 32, volatile=True)
    return tl.sum((words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _sum_before(words_ptr, total, part, parts, row, GROUP: tl.constexpr):
    """Publish the sum of this part; return the sum of the parts before it in its row, which started earlier.

    A part adds up those of its group and the sum before the group, which the last part of the group before publishes.
    So the order of summation is fixed.
    """
    words_ptr += row * (parts + tl.cdiv(parts, GROUP))
    tl.store(words_ptr + part, _word(total))
    group = part // GROUP
    others = group * GROUP + tl.arange(0, GROUP)
    before = _sum_of_words(words_ptr + others, others < part)
    groups = words_ptr + parts + group + tl.arange(0, 1)
    before += _sum_of_words(groups, (group > 0) & (tl.arange(0, 1) == 0))
    if (part % GROUP == GROUP - 1) & (part < parts - 1):
        tl.store(words_ptr + parts + group + 1, _word(before + total))
    return before


@triton.jit
def _load_block(x_ptr, start, first, last, BLOCK_N: tl.constexpr):
    """Load the elements of a block that are in [first, last); only a block at an end needs a mask."""
    offs = start + tl.arange(0, BLOCK_N)
    if (start >= first) & (start + BLOCK_N <= last):
        x = tl.load(x_ptr + tl.multiple_of(start, 16) + tl.arange(0, BLOCK_N))
    else:
        x = tl.load(x_ptr + offs, mask=(offs >= first) & (offs < last), other=0.0)
    return x


@triton.jit
def _cumsum_long(
    x_ptr, words_ptr, y_ptr, N, parts, part_size,
    REVERSE: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scan a row, or a part of one, block by block; REVERSE from its end. The next block is in flight meanwhile.

    Blocks start at multiples of 16 elements of memory, so only those at the ends of a row need masks. SPLIT: the sum of
    a part is published first, and its second read is from L2. Programs start in order, so none waits for a later one.
    """
    row = (tl.program_id(0) // parts).to(tl.int64)
    order = tl.program_id(0) % parts
    part = parts - 1 - order if REVERSE else order
    first = row * N
    last = first + N
    begin = first // 16 * 16 + part.to(tl.int64) * part_size
    end = tl.minimum(begin + part_size, last)
    carry = 0.0
    if SPLIT:
        total = tl.zeros([BLOCK_N], tl.float32)
        for start in range(begin, end, BLOCK_N):
            total += _load_block(x_ptr, start, first, last, BLOCK_N).to(tl.float32)
        carry = _sum_before(words_ptr, tl.sum(total), order, parts, row, GROUP)
    offs_n = tl.arange(0, BLOCK_N)
    LAST: tl.constexpr = 0 if REVERSE else BLOCK_N - 1  # pyright: ignore[reportAssignmentType]
    STEP: tl.constexpr = -BLOCK_N if REVERSE else BLOCK_N
    blocks = tl.cdiv(end - begin, BLOCK_N)
    start = begin + (blocks - 1) * BLOCK_N if REVERSE else begin
    x = _load_block(x_ptr, start, first, end, BLOCK_N)
    for _ in range(blocks):
        ahead = _load_block(x_ptr, start + STEP, tl.maximum(first, begin), end, BLOCK_N)
        y = carry + tl.cumsum(x.to(tl.float32), axis=0, reverse=REVERSE)
        carry = tl.sum(tl.where(offs_n == LAST, y, 0.0))
        y = y.to(y_ptr.dtype.element_ty)
        if (start >= first) & (start + BLOCK_N <= last):
            tl.store(y_ptr + tl.multiple_of(start, 16) + offs_n, y)
        else:
            tl.store(y_ptr + start + offs_n, y, mask=(start + offs_n >= first) & (start + offs_n < last))
        start += STEP
        x = ahead


@triton.jit
def _carry(total_ptr, rows, mask, REVERSE: tl.constexpr, SPLIT: tl.constexpr):
    """Return the sum of what comes before this part of each row, from the sums up to each of the `parts`."""
    if SPLIT:
        part = tl.program_id(1) + (1 if REVERSE else -1)
        has_others = mask & (part >= 0) & (part < tl.num_programs(1))
        carry = tl.load(total_ptr + rows * tl.num_programs(1) + part, mask=has_others, other=0.0)
    else:
        carry = rows.to(tl.float32) * 0.0
    return carry


@triton.jit
def _load_rows(ptrs, start, step, length, exists, REVERSE: tl.constexpr, UNROLL: tl.constexpr):
    """Load UNROLL rows of columns that follow each other."""
    xs = ()
    for u in tl.static_range(UNROLL):
        n = length - 1 - start - u if REVERSE else start + u
        xs = xs + (tl.load(ptrs + n * step, mask=exists & (start + u < length), other=0.0),)  # noqa: RUF005
    return xs


@triton.jit
def _cumsum_columns(
    x_ptr, total_ptr, y_ptr, columns_v, N, width_v, slice_v, part_size,
    REVERSE: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Scan a part of BLOCK_I columns, or all of them, row by row; the next UNROLL rows are in flight meanwhile."""
    outer, column, offs_i, exists = column_vectors(tl.program_id(0), columns_v, width_v, slice_v, WIDE, VEC, BLOCK_I)
    width = tl.cast(width_v, tl.int64) * VEC
    begin = tl.program_id(1).to(tl.int64) * part_size
    length = tl.minimum(begin + part_size, N) - begin
    x_ptrs = x_ptr + begin * width + offs_i
    y_ptrs = y_ptr + begin * width + offs_i
    carry = _carry(total_ptr, outer.to(tl.int64) * width + column, exists, REVERSE, SPLIT)
    xs = _load_rows(x_ptrs, 0, width, length, exists, REVERSE, UNROLL)
    for start in range(0, length, UNROLL):
        ahead = _load_rows(x_ptrs, start + UNROLL, width, length, exists, REVERSE, UNROLL)
        for u in tl.static_range(UNROLL):
            carry += xs[u].to(tl.float32)
            n = length - 1 - start - u if REVERSE else start + u
            y = carry.to(y_ptr.dtype.element_ty)
            tl.store(y_ptrs + n * width, y, mask=exists & (start + u < length))
        xs = ahead


def _default(form: str, itemsize: int, length: int) -> Config:
    if form == "columns":
        return {"BYTES": 16, "UNROLL": 16, "num_warps": 1}
    if form == "few columns":  # with fewer of them per program, and more rows in flight
        return {"BYTES": 8, "UNROLL": 32, "num_warps": 1}
    if form == "long":
        return {"BLOCK_N": 1024, "PART": 65536, "num_warps": 4}
    return {"BLOCK_M": 2048 // length or 1, "BLOCK_N": length, "num_warps": 4}


def _choices(form: str, itemsize: int, length: int) -> list[Config]:
    if form.endswith("columns"):
        return [{"BYTES": n, "UNROLL": unroll, "num_warps": 1} for n in (8, 16) for unroll in (8, 16, 32)]
    if form == "long":
        blocks = ((1024, 2), (1024, 4), (2048, 4), (4096, 4), (4096, 8))
        parts = (16384, 32768, 65536)
        return [{"BLOCK_N": n, "PART": part, "num_warps": w} for n, w in blocks for part in parts]
    rows = {tile // length or 1 for tile in (2048, 4096)}
    return [{"BLOCK_M": m, "BLOCK_N": length, "num_warps": w} for m in sorted(rows) for w in (1, 4, 8)]


CONFIG = ConfigTable("cumsum.json", _default, _choices)
_rows_launch = Launcher(_cumsum_rows)
_long_launch = Launcher(_cumsum_long)
_columns_launch = Launcher(_cumsum_columns)
Scan = Callable[[Tensor, Tensor], None]  # takes x and y


@cached_plan
def _plan(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, out: torch.dtype, device: int, reverse: bool
) -> Callable[[Tensor], Tensor]:
    """Return the function from a contiguous x to y."""
    layout = Layout.of(shape, (dim,))
    assert layout is not None
    scan = (_scan_rows if layout.K == 1 else _scan_columns)(layout, dtype, device, reverse)
    options = empty_like_options(shape) | ({} if out == dtype else {"dtype": out})

    def run(x: Tensor) -> Tensor:
        y = torch.empty_like(x, **options)
        scan(x, y)
        return y

    return run


def _scan_rows(layout: Layout, dtype: torch.dtype, device: int, reverse: bool) -> Scan:
    M, N = layout.outer, layout.N
    vector = math.gcd(N, VECTOR // dtype.itemsize)
    if (MAX_ROW if vector > 1 else MAX_ODD_ROW) >= N:
        config = CONFIG(device, "rows", dtype.itemsize, next_power_of_2(N))
        return _rows_launch.prepare((cdiv(M, config["BLOCK_M"]),), M, N, REVERSE=reverse, VEC=vector, **config)
    config = dict(CONFIG(device, "long", dtype.itemsize, min(MAX_KEY, next_power_of_2(N))))
    part = config.pop("PART")
    is_split = many_rows(gpu_facts(device)) > M and 2 * part < N
    part = part if is_split else N + ALIGNMENT
    parts = cdiv(N + ALIGNMENT - 1, part)  # the first starts at a multiple of it
    flags = {"REVERSE": reverse, "SPLIT": is_split, "GROUP": GROUP}
    launch = _long_launch.prepare((M * parts,), N, parts, part, **flags, **config)
    words = M * (parts + cdiv(parts, GROUP))

    def scan(x: Tensor, y: Tensor) -> None:
        launch(x, torch.zeros(words, dtype=torch.int64, device=x.device) if is_split else y, y)

    return scan


def _scan_columns(layout: Layout, dtype: torch.dtype, device: int, reverse: bool) -> Scan:
    N, K = layout.N, layout.K
    sms = gpu_facts(device).sms
    per_program = WARP * math.gcd(K, VECTOR // dtype.itemsize)
    form = "columns" if layout.rows >= FEW_PROGRAMS_PER_SM * sms * per_program else "few columns"
    config = dict(CONFIG(device, form, dtype.itemsize, next_power_of_2(min(4096, N))))
    vector = math.gcd(K, config.pop("BYTES") // dtype.itemsize)
    columns, rows, width, _, slices, _ = column_sizes(layout, 1, vector)
    block = WARP * vector * config["num_warps"]
    programs = cdiv(layout.rows, block)
    part, parts = N, 1
    if programs < FEW_PROGRAMS_PER_SM // 2 * sms:  # three passes over parts are faster
        part, parts = split_columns(programs, N, config["UNROLL"], SCAN_PROGRAMS_PER_SM * sms)
    flags = {"REVERSE": reverse, "SPLIT": parts > 1, "WIDE": layout.rows >= 2**31, "VEC": vector, "BLOCK_I": block}
    launch = _columns_launch.prepare((programs, parts), columns, rows, width, slices, part, **flags, **config)
    if parts == 1:
        return lambda x, y: launch(x, y, y)
    sum_parts = plan_part_sums(layout, part, parts, dtype, device)
    scan_parts = _plan((layout.rows, parts), 1, torch.float32, torch.float32, device, reverse)
    return lambda x, y: launch(x, scan_parts(sum_parts(x)), y)


def _empty(x: Tensor, dim: int, reverse: bool, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@operator("cumsum", fake=_empty)
def cumsum_forward(x: Tensor, dim: int, reverse: bool, dtype: torch.dtype | None) -> Tensor:
    """The cumulative sum over a dimension, from its start or from its end."""
    if not x.numel():
        return _empty(x, dim, reverse, dtype)
    return _plan(x.shape, dim, x.dtype, dtype or x.dtype, x.get_device(), reverse)(x.contiguous())


def _save(ctx, inputs, output) -> None:
    x, ctx.dim, ctx.reverse, _ = inputs
    ctx.dtype = x.dtype


def _backward(ctx, dy: Tensor):
    return cumsum_forward(dy, ctx.dim, not ctx.reverse, None).to(ctx.dtype)


cumsum_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_cumsum(x: Tensor) -> Tensor:
    return cumsum_forward(x, 1, False, None)


@op.also
def cumsum_over_a_leading_dimension(device: str) -> None:
    cumsum_forward(torch.empty(4096, 512, dtype=torch.bfloat16, device=device), 0, False, None)


CROSSOVER = Crossover("cumsum", always)


@cached_plan
def _plan_call(dim: int, x: TensorKey) -> Callable[[Tensor], Tensor] | None:
    shape, dtype, device = x
    if not has_elements(shape, dtype, dim):
        return None
    return _plan(shape, dim % len(shape), dtype, dtype, device, False)


def _call(dim: int, x: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    if not eligible_reduction(x, dtype) or not (dims := reduced_dims(x.dim(), dim)):
        return None
    return cumsum_forward(x, dims[0], False, dtype)


dispatch = Dispatch(_plan_call, _call)


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """Cumulative sum over a dimension, with the arguments of `torch.cumsum`."""
    y = None
    if type(dim) is int and out is None:
        y = dispatch(CROSSOVER, dim, input) if dtype is None else _call(dim, input, dtype)
    return torch.cumsum(input, dim, dtype=dtype, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return cumsum(x, -1)


op.over(torch.cumsum, cumsum, (0, 1))
