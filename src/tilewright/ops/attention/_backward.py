"""Flash attention backward with every mode, in Triton.

Each program owns what it writes, so nothing is added by atomics and results do not depend on the order of programs.
The gradient of the bias is the only one with a kernel of its own, since its broadcast dimensions are sums.
"""

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
from tilewright.ops.attention._triton import _block_and_head, _load, _load_row, _query_block


@triton.jit
def _lse_of(lse_ptr, offs_m, in_rows, MASKED: tl.constexpr):
    """Load log-sum-exps; +inf where a row sees nothing or does not exist, so that its probabilities are zero."""
    lse = _load_row(lse_ptr + offs_m, in_rows, float("inf"), MASKED)
    return tl.where(lse == -float("inf"), float("inf"), lse)


@triton.jit
def _probabilities(
    s, lse, b, h, head, i, j, center, in_bounds, visible, scale, softcap, slope, dropout_p,
    bias_ptr, mask_ptr, seed_ptr, stride_bm, stride_bn, stride_mb, stride_mh, stride_mm, stride_mn,
    HAS_SOFTCAP: tl.constexpr, MODIFIED: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Return the probabilities, the factor of their gradients, and what dropout multiplies both with.

    `visible` is None where every pair is.
    """
    factor = tl.full(s.shape, 1.0, tl.float32)
    if MODIFIED:
        s, factor = modified(
            s, b, h, i, j, center, in_bounds, scale, softcap, slope, bias_ptr, stride_bm, stride_bn,
            HAS_SOFTCAP, SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
        p = tl.exp2(s - lse)
    else:
        p = tl.exp2(s * (scale * LOG2_E) - lse)
    if visible is not None:
        if MASK_MOD is not None:
            visible = visible & MASK_MOD(b, h, i, j)
        p = tl.where(visible, p, 0.0)
    if mask_ptr is not None:
        mask_head = mask_ptr + b * stride_mb + h * stride_mh
        p = tl.where(masked_by(mask_head, i, j, in_bounds, stride_mm, stride_mn), p, 0.0)
    dropped = tl.full(s.shape, 1.0, tl.float32)
    if seed_ptr is not None:
        dropped = tl.where(kept(tl.load(seed_ptr), head, i, j, dropout_p), 1.0 / (1.0 - dropout_p), 0.0)
    return p, factor, dropped


@triton.jit
def _modes_bwd_dkdv(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, slopes_ptr, seed_ptr, begin_ptr, end_ptr, center_ptr, blocks_ptr,
    counts_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh,
    stride_kn, stride_vb, stride_vh, stride_vn, stride_bb, stride_bh, stride_bm, stride_bn, stride_mb, stride_mh,
    stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh, stride_dob, stride_doh, stride_dom, stride_dkb,
    stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, B, H, HKV, LQ, LK, D, DV, left, right, offset,
    heads_at_once, scale, softcap, dropout_p,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MODIFIED: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys iterates over the queries that see it; scores are transposed. `begin` and `end` are the keys'."""
    block, head_kv = _block_and_head(tl.cdiv(LK, BLOCK_N), B * HKV, heads_at_once)
    b = (head_kv // HKV).to(tl.int64)
    h_kv = (head_kv % HKV).to(tl.int64)
    start_n = block * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_keys = offs_n < LK
    row = tl.minimum(offs_n, LK - 1)
    begin, end = seen(row, LQ, right, left, -offset, begin_ptr, end_ptr, HAS_RIGHT, HAS_LEFT)
    j = offs_n[:, None]
    rows = offs_n.to(tl.int64)[:, None]
    k_ptrs = k_ptr + b * stride_kb + h_kv * stride_kh + rows * stride_kn + offs_d[None, :]
    v_ptrs = v_ptr + b * stride_vb + h_kv * stride_vh + rows * stride_vn + offs_dv[None, :]
    k = _load(k_ptrs, in_keys, offs_d < D, True, not EVEN_D)
    v = _load(v_ptrs, in_keys, offs_dv < DV, True, not EVEN_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    group = H // HKV
    for member in range(group):  # one program sums over the query heads of these keys
        h = h_kv * group + member
        head = b * H + h
        q_head = q_ptr + b * stride_qb + h * stride_qh
        dout_head = dout_ptr + b * stride_dob + h * stride_doh
        lse_head = lse_ptr + head * LQ
        delta_head = delta_ptr + head * LQ
        slope = None
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_sb + h * stride_sh).to(tl.float32)
        bias_head = None
        if bias_ptr is not None:
            bias_head = bias_ptr + b * stride_bb + h * stride_bh
        if blocks_ptr is not None:
            list_ptr, full_last, last = listed(
                blocks_ptr, counts_ptr, stride_lb, stride_lh, b, h, block, tl.cdiv(LQ, BLOCK_M)
            )
            first, full_first = 0, 0
        else:
            first, full_first, full_last, last = blocks_seen(
                start_n, LK, LQ, right, left, -offset, begin_ptr, end_ptr, BLOCK_N, BLOCK_M, HAS_RIGHT, HAS_LEFT
            )
        for masked in tl.static_range(MASKED + 1):
            step_begin, step_end = phase(masked, first, full_first, full_last, last)
            for step in range(step_begin, step_end):
                other = block_at(step, masked, full_first, full_last)
                start_m = other * BLOCK_M
                if blocks_ptr is not None:
                    start_m = tl.load(list_ptr + other) * BLOCK_M
                offs_m = start_m + tl.arange(0, BLOCK_M)
                i = offs_m[None, :]
                in_rows = offs_m < LQ
                columns = tl.arange(0, BLOCK_M)[:, None]
                q_ptrs = q_head + start_m.to(tl.int64) * stride_qm + columns * stride_qm + offs_d[None, :]
                q = _load(q_ptrs, in_rows, offs_d < D, masked, not EVEN_D)
                lse = _lse_of(lse_head, offs_m, in_rows, masked)
                center = i + offset
                if center_ptr is not None:
                    center = tl.load(center_ptr + tl.minimum(offs_m, LQ - 1))[None, :]
                visible = None
                if masked:
                    visible = (i >= begin[:, None]) & (i < end[:, None])
                s_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
                p_t, factor, dropped = _probabilities(
                    s_t, lse[None, :], b, h, head, i, j, center, in_rows[None, :] & in_keys[:, None], visible,
                    scale, softcap, slope, dropout_p, bias_head, mask_ptr, seed_ptr,
                    stride_bm, stride_bn, stride_mb, stride_mh, stride_mm, stride_mn,
                    HAS_SOFTCAP, MODIFIED, SCORE_MOD, SCORE_GRADIENT, MASK_MOD,
                )  # fmt: skip
                dout_ptrs = dout_head + start_m.to(tl.int64) * stride_dom + columns * stride_dom + offs_dv[None, :]
                dout = _load(dout_ptrs, in_rows, offs_dv < DV, masked, not EVEN_DV)
                dv = tl.dot((p_t * dropped).to(dout.dtype), dout, dv, input_precision=PRECISION)
                delta = _load_row(delta_head + offs_m, in_rows, 0.0, masked)
                dp_t = tl.dot(v, tl.trans(dout), input_precision=PRECISION) * dropped
                ds_t = p_t * (dp_t - delta[None, :]) * factor
                if masked or mask_ptr is not None:  # a query without a finite result must not reach hidden keys
                    ds_t = tl.where(p_t == 0.0, 0.0, ds_t)
                dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision=PRECISION)

    dk_ptrs = dk_ptr + b * stride_dkb + h_kv * stride_dkh + rows * stride_dkn + offs_d[None, :]
    dv_ptrs = dv_ptr + b * stride_dvb + h_kv * stride_dvh + rows * stride_dvn + offs_dv[None, :]
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_keys[:, None] & (offs_d < D)[None, :])
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_keys[:, None] & (offs_dv < DV)[None, :])


@triton.jit
def _modes_bwd_dq(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, slopes_ptr, seed_ptr, begin_ptr, end_ptr, center_ptr, blocks_ptr,
    counts_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dslope_ptr, stride_qb, stride_qh, stride_qm, stride_kb,
    stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_bb, stride_bh, stride_bm, stride_bn, stride_mb,
    stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh, stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm, B, H, HKV, LQ, LK, D, DV, left, right, offset, heads_at_once, scale, softcap,
    dropout_p,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MODIFIED: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries iterates over the keys that it sees; it also sums the gradient of its ALiBi slope by row."""
    head, b, h, h_kv, start_m = _query_block(B, H, HKV, LQ, heads_at_once, BLOCK_M, HAS_RIGHT)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_rows = offs_m < LQ
    row = tl.minimum(offs_m, LQ - 1)
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
    dout_ptrs = dout_ptr + b * stride_dob + h * stride_doh + rows * stride_dom + offs_dv[None, :]
    q = _load(q_ptrs, in_rows, offs_d < D, True, not EVEN_D)
    dout = _load(dout_ptrs, in_rows, offs_dv < DV, True, not EVEN_DV)
    lse = _lse_of(lse_ptr + (b * H + h) * LQ, offs_m, in_rows, True)
    delta = tl.load(delta_ptr + (b * H + h) * LQ + offs_m, mask=in_rows, other=0.0)
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dslope = tl.zeros([BLOCK_M], tl.float32)
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
            columns = tl.arange(0, BLOCK_N)[:, None]
            k_ptrs = k_ptr + start_n.to(tl.int64) * stride_kn + columns * stride_kn + offs_d[None, :]
            v_ptrs = v_ptr + start_n.to(tl.int64) * stride_vn + columns * stride_vn + offs_dv[None, :]
            k = _load(k_ptrs, offs_n < LK, offs_d < D, masked, not EVEN_D)
            v = _load(v_ptrs, offs_n < LK, offs_dv < DV, masked, not EVEN_DV)
            visible = None
            if masked:
                visible = (j >= begin[:, None]) & (j < end[:, None])
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            p, factor, dropped = _probabilities(
                s, lse[:, None], b, h, head, i, j, center, in_rows[:, None] & (j < LK), visible, scale, softcap, slope,
                dropout_p, bias_head, mask_ptr, seed_ptr,
                stride_bm, stride_bn, stride_mb, stride_mh, stride_mm, stride_mn,
                HAS_SOFTCAP, MODIFIED, SCORE_MOD, SCORE_GRADIENT, MASK_MOD,
            )  # fmt: skip
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * dropped
            ds = p * (dp - delta[:, None])
            if dslope_ptr is not None:
                dslope -= tl.sum(ds * tl.abs(center - j).to(tl.float32), axis=1)
            dq = tl.dot((ds * factor).to(k.dtype), k, dq, input_precision=PRECISION)

    if dslope_ptr is not None:
        tl.store(dslope_ptr + (b * H + h) * LQ + offs_m, dslope, mask=in_rows)
    dq_ptrs = dq_ptr + b * stride_dqb + h * stride_dqh + rows * stride_dqm + offs_d[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_rows[:, None] & (offs_d < D)[None, :])


@triton.jit
def _modes_bwd_dbias(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, slopes_ptr, seed_ptr, begin_ptr, end_ptr, center_ptr, dout_ptr, lse_ptr,
    delta_ptr, dbias_ptr, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_bb, stride_bh, stride_bm, stride_bn, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb,
    stride_sh, stride_dob, stride_doh, stride_dom, H, HKV, LQ, LK, D, DV, left, right, offset, scale, softcap,
    dropout_p, shared_b, shared_h, rows_m, rows_n,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MODIFIED: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr, SHARED_M: tl.constexpr,
    SHARED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the scores over the dimensions along which the bias is broadcast.

    A program owns a tile of the bias, in the grid (tiles of rows times tiles of columns, heads, batches) of the bias,
    and iterates over the `shared_b` batches, `shared_h` heads, and the rows or columns that share it.
    """
    tiles_n = 1 if SHARED_N else tl.cdiv(LK, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps_m = tl.cdiv(LQ, BLOCK_M) if SHARED_M else 1
    steps_n = tl.cdiv(LK, BLOCK_N) if SHARED_N else 1
    for step in range(shared_b * shared_h * steps_m):
        offs_m = (tile_m + step % steps_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        h = (tl.program_id(1) + step // steps_m % shared_h).to(tl.int64)
        b = (tl.program_id(2) + step // steps_m // shared_h).to(tl.int64)
        h_kv = h // (H // HKV)
        head = b * H + h
        in_rows = offs_m < LQ
        row = tl.minimum(offs_m, LQ - 1)
        begin, end = seen(row, LK, left, right, offset, begin_ptr, end_ptr, HAS_LEFT, HAS_RIGHT)
        i = offs_m[:, None]
        rows = offs_m.to(tl.int64)[:, None]
        center = i + offset
        if center_ptr is not None:
            center = tl.load(center_ptr + row)[:, None]
        slope = None
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_sb + h * stride_sh).to(tl.float32)
        q_ptrs = q_ptr + b * stride_qb + h * stride_qh + rows * stride_qm + offs_d[None, :]
        dout_ptrs = dout_ptr + b * stride_dob + h * stride_doh + rows * stride_dom + offs_dv[None, :]
        q = _load(q_ptrs, in_rows, offs_d < D, True, not EVEN_D)
        dout = _load(dout_ptrs, in_rows, offs_dv < DV, True, not EVEN_DV)
        lse = _lse_of(lse_ptr + head * LQ, offs_m, in_rows, True)
        delta = tl.load(delta_ptr + head * LQ + offs_m, mask=in_rows, other=0.0)
        first, _full_first, _full_last, last = blocks_seen(
            (tile_m + step % steps_m) * BLOCK_M, LQ, LK, left, right, offset, begin_ptr, end_ptr,
            BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        for block in range(tl.maximum(first, tile_n), tl.minimum(last, tile_n + steps_n)):
            offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            j = offs_n[None, :]
            columns = offs_n.to(tl.int64)[:, None]
            k_ptrs = k_ptr + b * stride_kb + h_kv * stride_kh + columns * stride_kn + offs_d[None, :]
            v_ptrs = v_ptr + b * stride_vb + h_kv * stride_vh + columns * stride_vn + offs_dv[None, :]
            k = _load(k_ptrs, offs_n < LK, offs_d < D, True, not EVEN_D)
            v = _load(v_ptrs, offs_n < LK, offs_dv < DV, True, not EVEN_DV)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            p, _factor, dropped = _probabilities(
                s, lse[:, None], b, h, head, i, j, center, in_rows[:, None] & (j < LK),
                (j >= begin[:, None]) & (j < end[:, None]), scale, softcap, slope, dropout_p,
                bias_ptr + b * stride_bb + h * stride_bh, mask_ptr, seed_ptr,
                stride_bm, stride_bn, stride_mb, stride_mh, stride_mm, stride_mn,
                HAS_SOFTCAP, MODIFIED, SCORE_MOD, SCORE_GRADIENT, MASK_MOD,
            )  # fmt: skip
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * dropped
            total += tl.where(p == 0.0, 0.0, p * (dp - delta[:, None]))  # hidden pairs are 0 even if delta is NaN

    dbias_ptr += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * rows_m * rows_n
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SHARED_M and SHARED_N:
        tl.store(dbias_ptr, tl.sum(total))
    elif SHARED_M:
        tl.store(dbias_ptr + offs_n, tl.sum(total, axis=0), mask=offs_n < LK)
    elif SHARED_N:
        tl.store(dbias_ptr + offs_m, tl.sum(total, axis=1), mask=offs_m < LQ)
    else:
        offs = offs_m.to(tl.int64)[:, None] * LK + offs_n[None, :]
        tl.store(dbias_ptr + offs, total, mask=(offs_m < LQ)[:, None] & (offs_n < LK)[None, :])
