"""Parts of the attention kernels with modes: which pairs are visible, and how a score is modified."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.attention._mods import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def seen(position, other, low, high, offset, begin_ptr, end_ptr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """Return the range of the other side that a position sees; with documents, from memory."""
    if begin_ptr is not None:
        begin = tl.load(begin_ptr + position)
        end = tl.load(end_ptr + position)
    else:
        begin = position * 0
        end = position * 0 + other
        if HAS_LOW:
            begin = tl.minimum(tl.maximum(position + offset - low, 0), other)
        if HAS_HIGH:
            end = tl.minimum(tl.maximum(position + offset + high + 1, 0), other)
    return begin, end


@triton.jit
def blocks_seen(
    start, length, other, low, high, offset, begin_ptr, end_ptr,
    BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
):  # fmt: skip
    """Return the blocks of the other side that a block sees: first, first and last of those seen in full, last.

    Ranges never move back from one position to the next, so the first and the last position decide.
    """
    head_begin, head_end = seen(start, other, low, high, offset, begin_ptr, end_ptr, HAS_LOW, HAS_HIGH)
    tail = tl.minimum(start + BLOCK, length) - 1
    tail_begin, tail_end = seen(tail, other, low, high, offset, begin_ptr, end_ptr, HAS_LOW, HAS_HIGH)
    first = head_begin // BLOCK_OTHER
    last = tl.where(tail_end > head_begin, tl.cdiv(tail_end, BLOCK_OTHER), first)
    full_first = tl.minimum(tl.maximum(tl.cdiv(tail_begin, BLOCK_OTHER), first), last)
    full_last = tl.minimum(tl.maximum(head_end // BLOCK_OTHER, full_first), last)
    return first, full_first, full_last, last


@triton.jit
def listed(blocks_ptr, counts_ptr, stride_b, stride_h, b, h, block, blocks):
    """Return the list of blocks that a block sees, with those seen in full first, and the two counts."""
    row = b * stride_b + h * stride_h + block
    full = tl.load(counts_ptr + row * 2)
    return blocks_ptr + row * blocks, full, full + tl.load(counts_ptr + row * 2 + 1)


@triton.jit
def phase(MASKED: tl.constexpr, first, full_first, full_last, last):
    """Return the range of steps over the blocks seen in full, or, if masked, over those before and after them."""
    if MASKED:
        begin, end = first, last - (full_last - full_first)
    else:
        begin, end = full_first, full_last
    return begin, end


@triton.jit
def block_at(step, MASKED: tl.constexpr, full_first, full_last):
    """Return the block of a step of a phase."""
    if MASKED:
        step = tl.where(step < full_first, step, step + (full_last - full_first))
    return step


@triton.jit
def modified(
    s, b, h, i, j, center, in_bounds, scale, softcap, slope, bias_ptr, stride_bm, stride_bn,
    HAS_SOFTCAP: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Return scores in base 2, and the factor from their gradients to those of the scaled products."""
    s = s * scale
    factor = tl.full(s.shape, 1.0, tl.float32)
    if HAS_SOFTCAP:
        t = tanh(s / softcap)
        s = softcap * t
        factor = 1.0 - t * t
    if SCORE_GRADIENT is not None:
        factor *= tl.broadcast_to(SCORE_GRADIENT(s, b, h, i, j).to(tl.float32), s.shape)
    if SCORE_MOD is not None:
        s = tl.broadcast_to(SCORE_MOD(s, b, h, i, j).to(tl.float32), s.shape)
    if slope is not None:
        s -= slope * tl.abs(center - j).to(tl.float32)
    if bias_ptr is not None:
        offs = i.to(tl.int64) * stride_bm + j.to(tl.int64) * stride_bn
        s += tl.load(bias_ptr + offs, mask=in_bounds, other=0.0).to(tl.float32)
    return s * LOG2_E, factor


@triton.jit
def masked_by(mask_ptr, i, j, in_bounds, stride_mm, stride_mn):
    offs = i.to(tl.int64) * stride_mm + j.to(tl.int64) * stride_mn
    return tl.load(mask_ptr + offs, mask=in_bounds, other=0) != 0


@triton.jit
def kept(seed, head, i, j, dropout_p):
    """Return which probabilities dropout keeps, drawn by their place alone, so that block sizes do not matter."""
    zero = (i * 0 + j * 0).to(tl.uint32)
    bits, _second, _third, _fourth = tl.philox(
        seed, zero + j.to(tl.uint32), zero + i.to(tl.uint32), zero + head.to(tl.uint32), zero
    )
    return tl.uint_to_uniform_float(bits) >= dropout_p
