"""The kernels of attention against a KV cache: one tile of rows against a chunk of tokens, and the combine.

The query heads that share a key head are packed into the rows of a tile: row r is query token r // G, head r % G of the
group. So a tile of 16 rows, the smallest that tensor cores take, holds 4 tokens of a model with 4 query heads per key
head, and every key is loaded once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.decode._rotary import load_rotated
from tilewright.ops.decode._splits import LN_2, LOG2_E, add_sink, average, divide, log_sum_exp, tokens_of
from tilewright.runtime.pdl import launch_dependents, wait_for_previous


@triton.jit
def token_offsets(
    table_ptr, start, offs_n, end, stride_p, stride_n, num_pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the offsets of the tokens start … start + BLOCK_N - 1 of a sequence, int64 [BLOCK_N].

    PAGE 0: contiguous. Where pages are multiples of a tile, a tile needs one entry of the block table. Entries from
    `end` on are never read.
    """
    token = start + offs_n
    if PAGE == 0:
        offsets = token.to(tl.int64) * stride_n
    elif PAGE % BLOCK_N == 0:
        page = _page(table_ptr + start // PAGE, True, num_pages)
        offsets = page * stride_p + (start % PAGE + offs_n).to(tl.int64) * stride_n
    else:
        page = _page(table_ptr + token // PAGE, token < end, num_pages)
        offsets = page * stride_p + (token % PAGE).to(tl.int64) * stride_n
    return offsets


@triton.jit
def _page(entry_ptrs, mask, num_pages):
    """Load entries of the block table."""
    page = tl.load(entry_ptrs, mask=mask, other=0).to(tl.int64)
    tl.device_assert((page >= 0) & (page < num_pages), "the block table names a page outside of the cache")
    return page


@triton.jit
def load_tokens(ptrs, in_tokens, in_columns, MASK_TOKENS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Load a tile of keys or values, masked only along the dimensions that need it."""
    if MASK_TOKENS and MASK_COLUMNS:
        tile = tl.load(ptrs, mask=in_tokens[:, None] & in_columns[None, :], other=0.0)
    elif MASK_TOKENS:
        tile = tl.load(ptrs, mask=in_tokens[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(ptrs, mask=in_columns[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def softmax_step(s, total, row_max):
    """Return the probabilities of scores in base 2, the new sum and maximum, and the factor of the sums so far."""
    new_max = tl.maximum(row_max, tl.max(s, axis=1))
    finite = tl.where(tl.abs(new_max) == float("inf"), 0.0, new_max)  # -inf: no token was visible yet
    p = tl.exp2(s - finite[:, None])
    rescale = tl.exp2(row_max - finite)
    return p, total * rescale + tl.sum(p, axis=1), new_max, rescale


@triton.jit
def _attend_tokens(
    acc, total, row_max, q, k_ptr, v_ptr, table_ptr, stride_kp, stride_kn, stride_vp, stride_vn, last, begin, end, D,
    num_pages, scale_log2, softcap_log2, window,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, EVEN_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tokens from `begin` to `end`; `last` is the last that each row sees."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        in_tokens = offs_n < end - start
        rows_k = token_offsets(table_ptr, start, offs_n, end, stride_kp, stride_kn, num_pages, PAGE, BLOCK_N)
        k = load_tokens(k_ptr + rows_k[:, None] + offs_d[None, :], in_tokens, offs_d < D, MASKED, not EVEN_D)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale_log2  # [BLOCK_M, BLOCK_N]
        if HAS_SOFTCAP:  # softcap tanh(s / softcap) with s in base 2: tanh(x) = 1 - 2 / (exp(2 x) + 1)
            s = softcap_log2 - 2 * softcap_log2 / (tl.exp2(s * (2 * LOG2_E / softcap_log2)) + 1)
        if MASKED:
            token = (start + offs_n)[None, :]
            visible = in_tokens[None, :] & (token <= last[:, None])
            if HAS_WINDOW:
                visible = visible & (token > (last - window)[:, None])
            s = tl.where(visible, s, -float("inf"))
        p, total, row_max, rescale = softmax_step(s, total, row_max)
        rows_v = token_offsets(table_ptr, start, offs_n, end, stride_vp, stride_vn, num_pages, PAGE, BLOCK_N)
        v = load_tokens(v_ptr + rows_v[:, None] + offs_d[None, :], in_tokens, offs_d < D, MASKED, not EVEN_D)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision=PRECISION)
    return acc, total, row_max


@triton.jit
def _decode_fwd(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, out_ptr,
    lse_ptr, stride_qb, stride_qm, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_tb, B, HKV, LQ, capacity, added, num_pages, window, programs, chunk, D, R, angles, scale_log2, softcap_log2,
    G: tl.constexpr, PAGE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, MIN_CHUNK: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, EVEN_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend a tile of rows to the tokens of a slot: partial results if SPLIT, else the output."""
    launch_dependents(PDL)
    # Neighboring programs take the rows, then the heads of the same tokens, which may be neighbors in memory.
    tiles = tl.cdiv(LQ * G, BLOCK_M)
    start_m = tl.program_id(0) % tiles * BLOCK_M
    h_kv = (tl.program_id(0) // tiles % HKV).to(tl.int64)
    slot = tl.program_id(0) // tiles // HKV
    b, begin, end, length = tokens_of(
        slot, lengths_ptr, B, capacity, added, LQ, window, programs, chunk,
        BLOCK_B, BLOCK_N, MIN_CHUNK, HAS_WINDOW, SPLIT,
    )  # fmt: skip
    if b >= B:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    b = b.to(tl.int64)
    at = length - LQ + offs_m // G  # position of each row's query
    last = at
    unmasked_end = begin
    if CAUSAL:
        end = tl.minimum(end, length - LQ + tl.minimum(start_m + BLOCK_M - 1, LQ * G - 1) // G + 1)
        if not HAS_WINDOW:
            unmasked_end = tl.minimum(end, length - LQ + start_m // G + 1) // BLOCK_N * BLOCK_N
    else:
        last = tl.zeros_like(at) + length
        unmasked_end = end // BLOCK_N * BLOCK_N
    unmasked_end = tl.maximum(unmasked_end, begin)

    heads = h_kv * G + offs_m % G  # [BLOCK_M]
    q_rows = q_ptr + b * stride_qb + (offs_m // G).to(tl.int64) * stride_qm + heads * stride_qh
    q = load_rotated(q_rows, cos_ptr, sin_ptr, at, offs_m < LQ * G, offs_d, D, R, angles, INTERLEAVED)
    if k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + h_kv)
    k_ptr += h_kv * stride_kh
    v_ptr += h_kv * stride_vh
    if PAGE == 0:
        k_ptr += b * stride_kp
        v_ptr += b * stride_vp
    else:
        table_ptr += b * stride_tb
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if not HAS_WINDOW:
        acc, total, row_max = _attend_tokens(
            acc, total, row_max, q, k_ptr, v_ptr, table_ptr, stride_kp, stride_kn, stride_vp, stride_vn, last, begin,
            unmasked_end, D, num_pages, scale_log2, softcap_log2, window,
            PAGE, BLOCK_N, BLOCK_D, False, EVEN_D, HAS_SOFTCAP, HAS_WINDOW, PRECISION,
        )  # fmt: skip
    acc, total, row_max = _attend_tokens(
        acc, total, row_max, q, k_ptr, v_ptr, table_ptr, stride_kp, stride_kn, stride_vp, stride_vn, last, unmasked_end,
        end, D, num_pages, scale_log2, softcap_log2, window,
        PAGE, BLOCK_N, BLOCK_D, True, EVEN_D, HAS_SOFTCAP, HAS_WINDOW, PRECISION,
    )  # fmt: skip

    out, lse = average(acc, total), log_sum_exp(total, row_max)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + h_kv)
    in_rows = offs_m < LQ * G
    if SPLIT:
        row = (slot.to(tl.int64) * HKV + h_kv) * LQ * G + offs_m
    else:
        row = (b * LQ + offs_m // G) * HKV * G + heads
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
            out, lse = add_sink(out, lse, sink)
        lse *= LN_2
    tl.store(lse_ptr + row, lse, mask=in_rows)
    out_ptrs = out_ptr + row[:, None] * D + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & (offs_d < D)[None, :])


@triton.jit
def _combine_fwd(
    partial_ptr, partial_lse_ptr, lengths_ptr, sinks_ptr, out_ptr, lse_ptr, B, HKV, LQ, capacity, added, window,
    programs, chunk, D,
    G: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one row: their average, weighted by the sums of exponentials."""
    wait_for_previous(WAITS)
    row = tl.program_id(0) % (LQ * G)
    h_kv = tl.program_id(0) // (LQ * G) % HKV
    b = tl.program_id(0) // (LQ * G) // HKV
    parts, chunk = divide(
        lengths_ptr, B, capacity, added, LQ, window, programs, chunk, BLOCK_B, BLOCK_N, MIN_CHUNK, HAS_WINDOW
    )
    offs_b = tl.arange(0, BLOCK_B)
    first = tl.sum(tl.where(offs_b < b, parts, 0))
    count = tl.sum(tl.where(offs_b == b, parts, 0))
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    total = tl.zeros([1], tl.float32)
    row_max = tl.full([1], -float("inf"), tl.float32)
    for start in range(0, count, BLOCK_S):
        in_parts = offs_s < count - start
        rows = ((first + start + offs_s).to(tl.int64) * HKV + h_kv) * LQ * G + row
        lse = tl.load(partial_lse_ptr + rows, mask=in_parts, other=-float("inf"))
        mask = in_parts[:, None] & (offs_d < D)[None, :]
        partial = tl.load(partial_ptr + rows[:, None] * D + offs_d[None, :], mask=mask, other=0.0)  # [BLOCK_S, BLOCK_D]
        p, total, row_max, rescale = softmax_step(lse[None, :], total, row_max)
        acc = acc * rescale[:, None] + tl.sum(tl.trans(p) * partial, axis=0)[None, :]
    out, lse = average(acc, total), log_sum_exp(total, row_max)
    h = h_kv * G + row % G
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2_E
        out, lse = add_sink(out, lse, sink)
    to = (b.to(tl.int64) * LQ + row // G) * HKV * G + h
    tl.store(lse_ptr + to + tl.arange(0, 1), lse * LN_2)
    out_ptrs = out_ptr + to * D + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(offs_d < D)[None, :])
