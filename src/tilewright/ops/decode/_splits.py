"""How the cached tokens of a batch are divided among programs, and how their results are combined.

The grid of a launch may not depend on the lengths, which only the GPU knows: a CUDA graph is replayed with others. So
the launch has a fixed number of slots, and every program derives from all lengths which tokens of which sequence its
slot stands for. The chunk size is the number of visible tokens of all sequences divided by the number of programs, so
that long sequences get more programs than short ones, and all programs except the last of each sequence do equal work:
sum(cdiv(tokens, chunk)) <= programs + B slots.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewright.runtime.sizes import cdiv

MAX_SPLIT_BATCH = 1024  # a program reads all lengths; that many sequences fill a GPU without splits
MIN_CHUNK = 256  # tokens: with fewer, combining costs more than another program saves
WAVES_WITHOUT_SPLITS = 8  # with this many times the programs, splits would balance little

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Splits(NamedTuple):
    """The part of a plan that decides on splits."""

    slots: int  # programs per head and tile of rows
    programs: int  # that the visible tokens are divided by
    chunk: int  # tokens per slot; 0: derived from the lengths
    is_split: bool  # False: slot = sequence, and no combine


def plan_splits(B: int, tiles: int, span: int, block_n: int, programs: int, num_splits: int) -> Splits:
    """Return the splits for B sequences of `span` visible tokens at most.

    `tiles` programs share a slot, one per head and tile of rows; `programs` in all keep the GPU busy. `num_splits`
    fixes the number of splits per sequence instead; 0 does not.
    """
    is_large = B > MAX_SPLIT_BATCH or B * tiles >= WAVES_WITHOUT_SPLITS * programs
    if num_splits > 1 and B <= MAX_SPLIT_BATCH and span > block_n:
        chunk = cdiv(cdiv(span, num_splits), block_n) * block_n
        return Splits(B * cdiv(span, chunk), 1, chunk, True)
    if num_splits or is_large or span <= MIN_CHUNK:
        return Splits(B, 1, 0, False)
    wanted = max(1, programs // tiles)
    return Splits(min(wanted + B, B * cdiv(span, MIN_CHUNK)), wanted, 0, True)


@triton.jit
def visible_range(length, capacity, LQ, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return where the tokens begin and end that some query of a sequence sees; the first is a multiple of BLOCK_N."""
    end = tl.minimum(length, capacity).to(tl.int32)
    begin = tl.zeros_like(end)
    if HAS_WINDOW:
        begin = tl.maximum(end - LQ - window + 1, 0) // BLOCK_N * BLOCK_N
    return begin, end


@triton.jit
def divide(
    lengths_ptr, B, capacity, added, LQ, window, programs, chunk,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the number of slots per sequence and the tokens per slot. `added` tokens follow those of `lengths`."""
    offs_b = tl.arange(0, BLOCK_B)
    length = tl.load(lengths_ptr + offs_b, mask=offs_b < B, other=-added) + added
    begin, end = visible_range(length, capacity, LQ, window, BLOCK_N, HAS_WINDOW)
    tokens = tl.maximum(end - begin, 0)
    if chunk == 0:
        share = tl.cdiv(tl.sum(tokens.to(tl.int64)), programs).to(tl.int32)
        chunk = tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, MIN_CHUNK)
    return tl.cdiv(tokens, chunk), chunk


@triton.jit
def tokens_of(
    slot, lengths_ptr, B, capacity, added, LQ, window, programs, chunk,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the sequence of a slot, where its tokens begin and end, and the length of the sequence.

    A slot that is not used has a sequence of B or more.
    """
    b = slot
    part = 0
    if SPLIT:
        offs_b = tl.arange(0, BLOCK_B)
        parts, chunk = divide(
            lengths_ptr, B, capacity, added, LQ, window, programs, chunk, BLOCK_B, BLOCK_N, MIN_CHUNK, HAS_WINDOW
        )
        b = tl.sum((tl.cumsum(parts, axis=0) <= slot).to(tl.int32))
        part = slot - tl.sum(tl.where(offs_b < b, parts, 0))
    length = tl.load(lengths_ptr + b, mask=b < B, other=0) + added
    tl.device_assert(length <= capacity, "a sequence is longer than its cache")
    begin, length = visible_range(length, capacity, LQ, window, BLOCK_N, HAS_WINDOW)
    end = length
    if SPLIT:
        begin += part * chunk
        end = tl.minimum(begin + chunk, length)
    return b, begin, end, length


@triton.jit
def add_sink(out, lse, sink):
    """Return the normalised output and its base-2 log-sum-exp with one more score, whose value is zero."""
    largest = tl.maximum(lse, sink)
    largest = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    both = largest + tl.log2(tl.exp2(lse - largest) + tl.exp2(sink - largest))
    return out * tl.where(lse == -float("inf"), 0.0, tl.exp2(lse - both))[:, None], both


@triton.jit
def average(acc, total):
    """Return the weighted average of values from their sum and that of the weights; zero where there are none."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def log_sum_exp(total, row_max):
    """Return log2 of a sum that is scaled by 2**-row_max; -inf where it is empty."""
    return tl.where(total == 0.0, -float("inf"), row_max + tl.log2(tl.where(total == 0.0, 1.0, total)))
