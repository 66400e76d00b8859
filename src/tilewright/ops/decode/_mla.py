"""The kernel of multi-head latent attention: all query heads against one cached vector per token.

A token's latent vector is both its key and its value, so a tile of them is loaded once and used in two GEMMs. It is
loaded as four tiles of 128 columns, the groups that share a scale in the quantized layout: there the scales multiply
scores and probabilities, not the tiles. The rows of a tile are query tokens and heads, row r is token r // H, head r %
H.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.decode._splits import LN_2, average, log_sum_exp, tokens_of
from tilewright.ops.decode._triton import load_tokens, softmax_step, token_offsets
from tilewright.runtime.pdl import launch_dependents


@triton.jit
def _group(kv_ptr, scales_ptr, rows, rows_s, in_tokens, n, dtype: tl.constexpr, QUANTIZED: tl.constexpr,
           GROUP: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load group n of the columns of a tile, and its scales [BLOCK_N], if any."""
    offs_g = n * GROUP + tl.arange(0, GROUP)
    k = load_tokens(kv_ptr + rows[:, None] + offs_g[None, :], in_tokens, None, MASKED, False).to(dtype)
    scale = rows
    if QUANTIZED:
        scale = (
            tl.load(scales_ptr + rows_s + n, mask=in_tokens, other=0.0) if MASKED else tl.load(scales_ptr + rows_s + n)
        )
    return k, scale


@triton.jit
def _add_scores(s, q, k, scale, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr):
    if QUANTIZED:
        s += tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale[None, :]
    else:
        s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
    return s


@triton.jit
def _add_values(acc, p, k, scale, rescale, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr):
    if QUANTIZED:
        p = p * scale[None, :]
    return tl.dot(p.to(k.dtype), k, acc * rescale[:, None], input_precision=PRECISION)


@triton.jit
def _attend_latents(
    acc_0, acc_1, acc_2, acc_3, total, row_max, q_0, q_1, q_2, q_3, q_rope, kv_ptr, rope_ptr, scales_ptr, table_ptr,
    stride_p, stride_n, stride_rp, stride_rn, stride_sp, stride_sn, last, begin, end, num_pages, scale_log2,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tokens from `begin` to `end`; `last` is the last that each row sees."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, ROPE)
    dtype: tl.constexpr = q_0.dtype
    for start in range(begin, end, BLOCK_N):
        in_tokens = offs_n < end - start
        rows = token_offsets(table_ptr, start, offs_n, end, stride_p, stride_n, num_pages, PAGE, BLOCK_N)
        rows_r = token_offsets(table_ptr, start, offs_n, end, stride_rp, stride_rn, num_pages, PAGE, BLOCK_N)
        rows_s = rows
        if QUANTIZED:
            rows_s = token_offsets(table_ptr, start, offs_n, end, stride_sp, stride_sn, num_pages, PAGE, BLOCK_N)
        rope = load_tokens(rope_ptr + rows_r[:, None] + offs_r[None, :], in_tokens, None, MASKED, False)
        k_0, c_0 = _group(kv_ptr, scales_ptr, rows, rows_s, in_tokens, 0, dtype, QUANTIZED, GROUP, MASKED)
        k_1, c_1 = _group(kv_ptr, scales_ptr, rows, rows_s, in_tokens, 1, dtype, QUANTIZED, GROUP, MASKED)
        k_2, c_2 = _group(kv_ptr, scales_ptr, rows, rows_s, in_tokens, 2, dtype, QUANTIZED, GROUP, MASKED)
        k_3, c_3 = _group(kv_ptr, scales_ptr, rows, rows_s, in_tokens, 3, dtype, QUANTIZED, GROUP, MASKED)
        s = tl.dot(q_rope, tl.trans(rope.to(dtype)), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        s = _add_scores(s, q_0, k_0, c_0, QUANTIZED, PRECISION)
        s = _add_scores(s, q_1, k_1, c_1, QUANTIZED, PRECISION)
        s = _add_scores(s, q_2, k_2, c_2, QUANTIZED, PRECISION)
        s = _add_scores(s, q_3, k_3, c_3, QUANTIZED, PRECISION) * scale_log2
        if MASKED:
            visible = in_tokens[None, :] & ((start + offs_n)[None, :] <= last[:, None])
            s = tl.where(visible, s, -float("inf"))
        p, total, row_max, rescale = softmax_step(s, total, row_max)
        acc_0 = _add_values(acc_0, p, k_0, c_0, rescale, QUANTIZED, PRECISION)
        acc_1 = _add_values(acc_1, p, k_1, c_1, rescale, QUANTIZED, PRECISION)
        acc_2 = _add_values(acc_2, p, k_2, c_2, rescale, QUANTIZED, PRECISION)
        acc_3 = _add_values(acc_3, p, k_3, c_3, rescale, QUANTIZED, PRECISION)
    return acc_0, acc_1, acc_2, acc_3, total, row_max


@triton.jit
def _store_group(out_ptrs, acc, total, in_rows, n, GROUP: tl.constexpr):
    out = average(acc, total)
    ptrs = out_ptrs[:, None] + (n * GROUP + tl.arange(0, GROUP))[None, :]
    tl.store(ptrs, out.to(out_ptrs.dtype.element_ty), mask=in_rows[:, None])


@triton.jit
def _mla_fwd(
    q_ptr, kv_ptr, rope_ptr, scales_ptr, lengths_ptr, table_ptr, out_ptr, lse_ptr, stride_qb, stride_qm, stride_qh,
    stride_p, stride_n, stride_rp, stride_rn, stride_sp, stride_sn, stride_tb, B, LQ, capacity, num_pages, programs,
    chunk, scale_log2,
    H: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend a tile of rows to the tokens of a slot: partial results if SPLIT, else the output."""
    launch_dependents(PDL)
    # Neighboring programs read the same tokens for other rows: from L2.
    tiles = tl.cdiv(LQ * H, BLOCK_M)
    start_m = tl.program_id(0) % tiles * BLOCK_M
    slot = tl.program_id(0) // tiles
    b, begin, end, length = tokens_of(
        slot, lengths_ptr, B, capacity, 0, LQ, 0, programs, chunk, BLOCK_B, BLOCK_N, MIN_CHUNK, False, SPLIT
    )
    if b >= B:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    in_rows = offs_m < LQ * H
    b = b.to(tl.int64)
    if CAUSAL:
        last = length - LQ + offs_m // H  # position of each row's query
        end = tl.minimum(end, length - LQ + tl.minimum(start_m + BLOCK_M - 1, LQ * H - 1) // H + 1)
        unmasked_end = tl.minimum(end, length - LQ + start_m // H + 1) // BLOCK_N * BLOCK_N
    else:
        last = tl.zeros_like(offs_m) + length
        unmasked_end = end // BLOCK_N * BLOCK_N
    unmasked_end = tl.maximum(unmasked_end, begin)

    q_ptrs = q_ptr + b * stride_qb + (offs_m // H).to(tl.int64) * stride_qm + (offs_m % H) * stride_qh
    offs_g = tl.arange(0, GROUP)
    q_0 = tl.load(q_ptrs[:, None] + offs_g[None, :], mask=in_rows[:, None], other=0.0)
    q_1 = tl.load(q_ptrs[:, None] + GROUP + offs_g[None, :], mask=in_rows[:, None], other=0.0)
    q_2 = tl.load(q_ptrs[:, None] + 2 * GROUP + offs_g[None, :], mask=in_rows[:, None], other=0.0)
    q_3 = tl.load(q_ptrs[:, None] + 3 * GROUP + offs_g[None, :], mask=in_rows[:, None], other=0.0)
    q_rope = tl.load(q_ptrs[:, None] + 4 * GROUP + tl.arange(0, ROPE)[None, :], mask=in_rows[:, None], other=0.0)
    if PAGE == 0:
        kv_ptr += b * stride_p
        rope_ptr += b * stride_rp
        if QUANTIZED:
            scales_ptr += b * stride_sp
    else:
        table_ptr += b * stride_tb
    acc_0 = tl.zeros([BLOCK_M, GROUP], tl.float32)
    acc_1 = tl.zeros([BLOCK_M, GROUP], tl.float32)
    acc_2 = tl.zeros([BLOCK_M, GROUP], tl.float32)
    acc_3 = tl.zeros([BLOCK_M, GROUP], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    acc_0, acc_1, acc_2, acc_3, total, row_max = _attend_latents(
        acc_0, acc_1, acc_2, acc_3, total, row_max, q_0, q_1, q_2, q_3, q_rope, kv_ptr, rope_ptr, scales_ptr,
        table_ptr, stride_p, stride_n, stride_rp, stride_rn, stride_sp, stride_sn, last, begin, unmasked_end,
        num_pages, scale_log2, PAGE, GROUP, ROPE, QUANTIZED, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc_0, acc_1, acc_2, acc_3, total, row_max = _attend_latents(
        acc_0, acc_1, acc_2, acc_3, total, row_max, q_0, q_1, q_2, q_3, q_rope, kv_ptr, rope_ptr, scales_ptr,
        table_ptr, stride_p, stride_n, stride_rp, stride_rn, stride_sp, stride_sn, last, unmasked_end, end,
        num_pages, scale_log2, PAGE, GROUP, ROPE, QUANTIZED, BLOCK_N, True, PRECISION,
    )  # fmt: skip

    row = (slot if SPLIT else b).to(tl.int64) * LQ * H + offs_m
    lse = log_sum_exp(total, row_max)
    tl.store(lse_ptr + row, lse if SPLIT else lse * LN_2, mask=in_rows)
    out_ptrs = out_ptr + row * (4 * GROUP)
    _store_group(out_ptrs, acc_0, total, in_rows, 0, GROUP)
    _store_group(out_ptrs, acc_1, total, in_rows, 1, GROUP)
    _store_group(out_ptrs, acc_2, total, in_rows, 2, GROUP)
    _store_group(out_ptrs, acc_3, total, in_rows, 3, GROUP)
