"""Cumulative sum over a dimension: y_n = x_1 + … + x_n.

A program goes along its rows, or columns, block by block, and carries the sum on. Of few long rows, each is cut into
pieces: one kernel sums the pieces, and another begins each with the sum of those before it. The gradient is the same,
from the other end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.reduce._operators import CHECK, Launch, named, sizes, split, takes
from tilewright.runtime.configs import Config, Tuned, planned
from tilewright.runtime.eligibility import filling, has_elements, is_quiet, is_ready
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Op, points


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
def _places(M, N, inner, tiles, BLOCK_M: tl.constexpr):
    """Where this program's rows of [M, N], or columns of [M, N, inner], begin, and which there are."""
    program = tl.program_id(0).to(tl.int64)  # int64: M * N may pass 2**31
    if inner == 1:
        offs_m = program * BLOCK_M + tl.arange(0, BLOCK_M)
        return offs_m * N, offs_m < M, offs_m
    else:
        offs_i = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        return program // tiles * N * inner + offs_i, offs_i < inner, program // tiles * inner + offs_i


@triton.jit
def _cumsum_pieces(x_ptr, total_ptr, M, N, inner, tiles, chunk, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum of a piece of each row."""
    starts, is_row, offs_m = _places(M, N, inner, tiles, BLOCK_M)
    piece = tl.program_id(1).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(piece * chunk, tl.minimum((piece + 1) * chunk, N), BLOCK_N):
        n = first + offs_n  # a piece is whole blocks, but for the row's end
        inside = is_row[:, None] & (n < N)[None, :]
        total += tl.load(x_ptr + starts[:, None] + n[None, :] * inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + offs_m * tl.num_programs(1) + piece, tl.sum(total, axis=1), mask=is_row)


@triton.jit
def _cumsum_fwd(
    x_ptr, total_ptr, y_ptr, M, N, inner, tiles, chunk,
    REVERSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A piece of each row, or all of it; in REVERSE from its end."""
    starts, is_row, offs_m = _places(M, N, inner, tiles, BLOCK_M)
    piece = tl.program_id(1).to(tl.int64)
    pieces = tl.num_programs(1)
    offs_n = tl.arange(0, BLOCK_N)
    LAST: tl.constexpr = 0 if REVERSE else BLOCK_N - 1
    carry = tl.zeros([BLOCK_M], tl.float32)
    if BLOCK_P > 1:  # the pieces before this one
        offs_p = tl.arange(0, BLOCK_P)
        is_before = (offs_p > piece) & (offs_p < pieces) if REVERSE else offs_p < piece
        totals = total_ptr + offs_m[:, None] * pieces + offs_p[None, :]
        carry += tl.sum(tl.load(totals, mask=is_row[:, None] & is_before[None, :], other=0.0), axis=1)
    begin = piece * chunk
    blocks = tl.cdiv(tl.minimum(begin + chunk, N) - begin, BLOCK_N)
    for block in range(blocks):
        n = begin + (blocks - 1 - block if REVERSE else block) * BLOCK_N + offs_n
        inside = is_row[:, None] & (n < N)[None, :]
        offs = starts[:, None] + n[None, :] * inner
        x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        y = carry[:, None] + tl.cumsum(x, axis=1, reverse=REVERSE)
        carry = tl.sum(tl.where(offs_n[None, :] == LAST, y, 0.0), axis=1)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=inside)


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


CONFIG = Tuned("cumsum.json", _default, _choices)
_pieces = Launcher(_cumsum_pieces)
_forward = Launcher(_cumsum_fwd)


@planned
def _plan(shape: tuple[int, ...], dim: int, dtype: torch.dtype, out: torch.dtype, device: int, reverse: bool) -> Launch:
    """How x becomes y."""
    outer, N, inner = sizes(shape, dim, dim + 1)
    form = "rows" if inner == 1 else "columns"
    length, width = (next_power_of_2(min(longest, size)) for longest, size in ((4096, N), (256, inner)))
    config = CONFIG(device, form, dtype.itemsize, length, width)
    tiles = 1 if inner == 1 else cdiv(inner, config["BLOCK_M"])
    programs = cdiv(outer, config["BLOCK_M"]) if inner == 1 else outer * tiles
    chunk, pieces = split(programs, N, config["BLOCK_N"])
    given = outer, N, inner, tiles, chunk
    cumulate = _forward.prepare((programs, pieces), *given, REVERSE=reverse, BLOCK_P=next_power_of_2(pieces), **config)
    if pieces == 1:
        return lambda x, y: cumulate(x, y, y)
    add_up = _pieces.prepare((programs, pieces), *given, **config)

    def launch(x: Tensor, y: Tensor) -> None:
        totals = torch.empty(outer * inner, pieces, dtype=torch.float32, device=x.device)
        add_up(x, totals)
        cumulate(x, totals, y)

    return launch


def _empty(x: Tensor, dim: int, reverse: bool, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@operator("cumsum", fake=_empty)
def cumsum_forward(x: Tensor, dim: int, reverse: bool, dtype: torch.dtype | None) -> Tensor:
    """The cumulative sum over a dimension, from its beginning or from its end."""
    y = _empty(x, dim, reverse, dtype)
    if x.numel():
        _plan(x.shape, dim, x.dtype, y.dtype, x.get_device(), reverse)(x.contiguous(), y)
    return y


def _save(ctx, inputs, output) -> None:
    x, ctx.dim, ctx.reverse, _ = inputs
    ctx.dtype = x.dtype


def _backward(ctx, dy: Tensor):
    return cumsum_forward(dy, ctx.dim, not ctx.reverse, None).to(ctx.dtype), None, None, None


cumsum_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_cumsum(x: Tensor) -> Tensor:
    return cumsum_forward(x, 1, False, None)


SMALLEST = 0  # elements: torch takes longer than our call costs the host, however small the input


@planned
def _way(shape: tuple[int, ...], dtype: torch.dtype, device: int, dim: int) -> Callable[[Tensor], Tensor] | None:
    """From x as it lies in memory to its sums; None if that is torch's to do."""
    if not has_elements(shape, dtype, dim):
        return None
    return filling(_plan(shape, dim % len(shape), dtype, dtype, device, False), shape)


def _by_ours(x: Any, dim: int, dtype: torch.dtype | None) -> Tensor | None:
    """None if our kernels cannot take it as torch would."""
    if dtype is None and is_quiet() and is_ready(x):
        way = _way(x.shape, x.dtype, x.get_device(), dim)
        return way and way(x)
    if takes(SMALLEST, x, dtype) and (dims := named(x, dim)):
        return cumsum_forward(x, dims[0], False, dtype)
    return None


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """As `torch.cumsum`: the fast kernels where they fit, torch elsewhere."""
    y = _by_ours(input, dim, dtype) if type(dim) is int and out is None else None
    return torch.cumsum(input, dim, dtype=dtype, out=out) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return cumsum(x, -1)
