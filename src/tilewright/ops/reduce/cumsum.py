"""Cumulative sum over a dimension: y_n = x_1 + … + x_n.

A program scans its rows or columns block by block and carries the sum. Few long rows are split into parts: one kernel
sums the parts, and a second scans each, starting from the sum of those before it. The gradient is the same scan from
the other end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.reduce._cases import CHECK
from tilewright.ops.reduce._operators import Reduce, eligible_reduction, reduced_dims, split, split_sizes
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.eligibility import Dispatch, TensorKey, empty_like_options, has_elements
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Op, points

__all__ = ["cumsum"]


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
)


@triton.jit
def _row_starts(M, N, inner, tiles, BLOCK_M: tl.constexpr):
    """Return where this program's rows of [M, N], or columns of [M, N, inner], start, which exist, and their number."""
    program = tl.program_id(0).to(tl.int64)  # int64: M * N may exceed 2**31
    if inner == 1:
        offs_m = program * BLOCK_M + tl.arange(0, BLOCK_M)
        return offs_m * N, offs_m < M, offs_m
    else:
        offs_i = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        return program // tiles * N * inner + offs_i, offs_i < inner, program // tiles * inner + offs_i


@triton.jit
def _cumsum_parts(x_ptr, total_ptr, M, N, inner, tiles, part_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum a part of each row."""
    starts, is_row, offs_m = _row_starts(M, N, inner, tiles, BLOCK_M)
    part = tl.program_id(1).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(part * part_size, tl.minimum((part + 1) * part_size, N), BLOCK_N):
        n = first + offs_n  # a part is whole blocks, except at the end of the row
        in_bounds = is_row[:, None] & (n < N)[None, :]
        total += tl.load(x_ptr + starts[:, None] + n[None, :] * inner, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(total_ptr + offs_m * tl.num_programs(1) + part, tl.sum(total, axis=1), mask=is_row)


@triton.jit
def _cumsum_fwd(
    x_ptr, total_ptr, y_ptr, M, N, inner, tiles, part_size,
    REVERSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Scan a part of each row, or all of it; REVERSE from its end."""
    starts, is_row, offs_m = _row_starts(M, N, inner, tiles, BLOCK_M)
    part = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(1)
    offs_n = tl.arange(0, BLOCK_N)
    LAST: tl.constexpr = 0 if REVERSE else BLOCK_N - 1
    carry = tl.zeros([BLOCK_M], tl.float32)
    if BLOCK_P > 1:  # the parts before this one
        offs_p = tl.arange(0, BLOCK_P)
        is_before = (offs_p > part) & (offs_p < parts) if REVERSE else offs_p < part
        totals = total_ptr + offs_m[:, None] * parts + offs_p[None, :]
        carry += tl.sum(tl.load(totals, mask=is_row[:, None] & is_before[None, :], other=0.0), axis=1)
    begin = part * part_size
    blocks = tl.cdiv(tl.minimum(begin + part_size, N) - begin, BLOCK_N)
    for block in range(blocks):
        n = begin + (blocks - 1 - block if REVERSE else block) * BLOCK_N + offs_n
        in_bounds = is_row[:, None] & (n < N)[None, :]
        offs = starts[:, None] + n[None, :] * inner
        x = tl.load(x_ptr + offs, mask=in_bounds, other=0.0).to(tl.float32)
        y = carry[:, None] + tl.cumsum(x, axis=1, reverse=REVERSE)
        carry = tl.sum(tl.where(offs_n[None, :] == LAST, y, 0.0), axis=1)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=in_bounds)


def _default(form: str, size: int, length: int, width: int) -> Config:
    if form == "columns":
        return {"BLOCK_M": min(32, width), "BLOCK_N": min(128, length), "num_warps": 4}
    block = min(4096, length)
    return {"BLOCK_M": 2048 // block or 1, "BLOCK_N": block, "num_warps": 4}


def _choices(form: str, size: int, length: int, width: int) -> list[Config]:
    if form == "columns":
        shapes = [(min(m, width), min(n, length)) for m in (32, 64) for n in (32, 64, 128)]
    else:
        shapes = [
            (tile // n or 1, n) for tile in (2048, 4096) for n in {min(longest, length) for longest in (1024, 4096)}
        ]
    return [{"BLOCK_M": m, "BLOCK_N": n, "num_warps": w} for m, n in sorted(set(shapes)) for w in (4, 8)]


CONFIG = ConfigTable("cumsum.json", _default, _choices)
_sum_parts = Launcher(_cumsum_parts)
_forward = Launcher(_cumsum_fwd)


@cached_plan
def _plan(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, out: torch.dtype, device: int, reverse: bool
) -> Callable[[Tensor], Tensor]:
    """Return the function from a contiguous x to y."""
    outer, N, inner = split_sizes(Reduce(dim, dim + 1, False, "sum"), shape)
    form = "rows" if inner == 1 else "columns"
    length, width = (next_power_of_2(min(longest, size)) for longest, size in ((4096, N), (256, inner)))
    config = CONFIG(device, form, dtype.itemsize, length, width)
    tiles = 1 if inner == 1 else cdiv(inner, config["BLOCK_M"])
    programs = cdiv(outer, config["BLOCK_M"]) if inner == 1 else outer * tiles
    part_size, parts = split(programs, N, config["BLOCK_N"])
    given = outer, N, inner, tiles, part_size
    cumulate = _forward.prepare((programs, parts), *given, REVERSE=reverse, BLOCK_P=next_power_of_2(parts), **config)
    sum_parts = _sum_parts.prepare((programs, parts), *given, **config)
    options = empty_like_options(shape) | ({} if out == dtype else {"dtype": out})

    def run(x: Tensor) -> Tensor:
        y = torch.empty_like(x, **options)
        if parts == 1:
            cumulate(x, y, y)
        else:
            totals = torch.empty(outer * inner, parts, dtype=torch.float32, device=x.device)
            sum_parts(x, totals)
            cumulate(x, totals, y)
        return y

    return run


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


SMALLEST = 0  # elements: torch takes longer than our call costs the host at every size


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
        y = dispatch(SMALLEST, dim, input) if dtype is None else _call(dim, input, dtype)
    return torch.cumsum(input, dim, dtype=dtype, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return cumsum(x, -1)
