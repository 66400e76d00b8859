"""Flash attention forward with every mode, in Triton; a mode that a call does not use costs it nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.attention._score import (
    LOG2_E,
    block_at,
    blocks_seen,
    kept,
    listed,
    masked_by,
    modified,
    phase,
    seen,
)
from tilewright.ops.attention._triton import _load, _query_block


@triton.jit
def _modes_fwd(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, seed_ptr, begin_ptr, end_ptr, center_ptr,
    blocks_ptr, counts_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_bb, stride_bh, stride_bm, stride_bn, stride_mb, stride_mh, stride_mm,
    stride_mn, stride_sb, stride_sh, stride_lb, stride_lh, stride_ob, stride_oh, stride_om, B, H, HKV, LQ, LK, D, DV,
    left, right, offset, heads_at_once, scale, softcap, dropout_p,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MODIFIED: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, b, h, h_kv, start_m = _query_block(B, H, HKV, LQ, heads_at_once, BLOCK_M, HAS_RIGHT)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_rows = offs_m < LQ
    row = tl.minimum(offs_m, LQ - 1)  # rows past the end see what the last one sees
    begin, end = seen(row, LK, left, right, offset, begin_ptr, end_ptr, HAS_LEFT, HAS_RIGHT)
    i = offs_m[:, None]
    center = i + offset
    if center_ptr is not None:
        center = tl.load(center_ptr + row)[:, None]
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_sb + h * stride_sh).to(tl.float32)
    bias_head = None
    if bias_ptr is not None:
        bias_head = bias_ptr + b * stride_bb + h * stride_bh
    rows = offs_m.to(tl.int64)[:, None]
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh + rows * stride_qm + offs_d[None, :]
    q = _load(q_ptrs, in_rows, offs_d < D, True, not EVEN_D)
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a sink is a score whose value is zero
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * LOG2_E
        total += 1.0
    base2 = 1.0 if MODIFIED else scale * LOG2_E  # from scores to base 2; positive

    if blocks_ptr is not None:
        list_ptr, full_last, last = listed(
            blocks_ptr, counts_ptr, stride_lb, stride_lh, b, h, start_m // BLOCK_M, tl.cdiv(LK, BLOCK_N)
        )
        first, full_first = 0, 0
    else:
        first, full_first, full_last, last = blocks_seen(
            start_m, LQ, LK, left, right, offset, begin_ptr, end_ptr, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
    for masked in tl.static_range(MASKED + 1):
        step_begin, step_end = phase(masked, first, full_first, full_last, last)
        for step in range(step_begin, step_end):
            block = block_at(step, masked, full_first, full_last)
            start_n = block * BLOCK_N
            if blocks_ptr is not None:
                start_n = tl.load(list_ptr + block) * BLOCK_N
            offs_n = start_n + tl.arange(0, BLOCK_N)
            j = offs_n[None, :]
            in_bounds = in_rows[:, None] & (j < LK)
            columns = tl.arange(0, BLOCK_N)[:, None]
            k_ptrs = k_ptr + start_n.to(tl.int64) * stride_kn + columns * stride_kn + offs_d[None, :]
            k = _load(k_ptrs, offs_n < LK, offs_d < D, masked, not EVEN_D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if MODIFIED:
                s, _factor = modified(
                    s, b, h, i, j, center, in_bounds, scale, softcap, slope, bias_head, stride_bm, stride_bn,
                    HAS_SOFTCAP, SCORE_MOD, SCORE_GRADIENT,
                )  # fmt: skip
            if masked:
                visible = (j >= begin[:, None]) & (j < end[:, None])
                if MASK_MOD is not None:
                    visible = visible & MASK_MOD(b, h, i, j)
                s = tl.where(visible, s, -float("inf"))
            if mask_ptr is not None:
                mask_head = mask_ptr + b * stride_mb + h * stride_mh
                s = tl.where(masked_by(mask_head, i, j, in_bounds, stride_mm, stride_mn), s, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(s, axis=1) * base2)
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf would be NaN
            p = tl.exp2(s * base2 - shift[:, None])
            rescale = tl.exp2(row_max - shift)
            total = total * rescale + tl.sum(p, axis=1)
            if seed_ptr is not None:
                p = tl.where(kept(tl.load(seed_ptr), head, i, j, dropout_p), p, 0.0)
            v_ptrs = v_ptr + start_n.to(tl.int64) * stride_vn + columns * stride_vn + offs_dv[None, :]
            v = _load(v_ptrs, offs_n < LK, offs_dv < DV, masked, not EVEN_DV)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            row_max = new_max

    lse_ptr += tl.cast(head, tl.int64) * LQ
    tl.store(lse_ptr + offs_m, row_max + tl.log2(total), mask=in_rows)
    kept_total = tl.where(total == 0.0, 1.0, total)
    if seed_ptr is not None:
        kept_total *= 1.0 - dropout_p
    out = (acc / kept_total[:, None]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + b * stride_ob + h * stride_oh + rows * stride_om + offs_dv[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None] & (offs_dv < DV)[None, :])
