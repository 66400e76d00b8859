"""Flash attention in Triton: all keys, or, if causal, those not after the query."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block_and_head(blocks, heads, heads_at_once):
    """Return block and head of this program. Programs take all blocks of `heads_at_once` heads, then the next heads."""
    pid = tl.program_id(0)
    first = pid // (blocks * heads_at_once) * heads_at_once
    width = tl.minimum(heads - first, heads_at_once)
    index = pid % (blocks * heads_at_once)
    return index // width, first + index % width


@triton.jit
def _query_block(B, H, HKV, LQ, heads_at_once, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """Return head (over all batches), batch, head, head of the keys and first query of this program."""
    blocks = tl.cdiv(LQ, BLOCK_M)
    block, head = _block_and_head(blocks, B * H, heads_at_once)
    if CAUSAL:
        block = blocks - 1 - block  # the longest first, so that short ones fill the last wave
    b = (head // H).to(tl.int64)  # int64: offsets of heads may exceed 2**31
    h = (head % H).to(tl.int64)
    return head, b, h, h // (H // HKV), block * BLOCK_M


@triton.jit
def _load(ptrs, in_rows, in_columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Load a tile, masked only along the dimensions that need it."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(ptrs, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=in_rows[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(ptrs, mask=in_columns[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _load_row(ptrs, mask, other, MASKED: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=other) if MASKED else tl.load(ptrs)


@triton.jit
def _unmasked_end(start_m, LK, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return where the full blocks of keys end that are visible to every query from start_m on: they need no mask."""
    return (tl.minimum(start_m + 1, LK) if CAUSAL else LK) // BLOCK_N * BLOCK_N


@triton.jit
def _visible_end(start_m, LK, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """Return where the keys end that are visible to some query of the block."""
    return tl.minimum(start_m + BLOCK_M, LK) if CAUSAL else LK


@triton.jit
def _visible(offs_m, offs_n, LK, CAUSAL: tl.constexpr):
    """Return which keys are visible to which query."""
    in_bounds = (offs_n < LK)[None, :]
    return in_bounds & (offs_m[:, None] >= offs_n[None, :]) if CAUSAL else in_bounds


@triton.jit
def _fwd_keys(
    acc, total, row_max, q, k_ptr, v_ptr, stride_kn, stride_vn, offs_m, begin, end, LK, D, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the keys from `begin` to `end`."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = offs_n[:, None] * stride_kn + offs_d[None, :]  # [BLOCK_N, BLOCK_D]
    offs_v = offs_n[:, None] * stride_vn + offs_d[None, :]
    k_ptr += tl.cast(begin, tl.int64) * stride_kn
    v_ptr += tl.cast(begin, tl.int64) * stride_vn
    for start_n in range(begin, end, BLOCK_N):
        k = _load(k_ptr + offs_k, offs_n < LK - start_n, offs_d < D, MASKED, not EVEN_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            s = tl.where(_visible(offs_m, start_n + offs_n, LK, CAUSAL), s, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        total = total * rescale + tl.sum(p, axis=1)
        v = _load(v_ptr + offs_v, offs_n < LK - start_n, offs_d < D, MASKED, not EVEN_D)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
        k_ptr += BLOCK_N * stride_kn
        v_ptr += BLOCK_N * stride_vn
    return acc, total, row_max


@triton.jit
def _attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om, B, H, HKV, LQ, LK, D, scale_log2, heads_at_once,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, b, h, h_kv, start_m = _query_block(B, H, HKV, LQ, heads_at_once, BLOCK_M, CAUSAL)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh
    out_ptr += b * stride_ob + h * stride_oh
    lse_ptr += tl.cast(head, tl.int64) * LQ

    q_ptrs = q_ptr + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d[None, :]
    q = _load(q_ptrs, offs_m < LQ, offs_d < D, True, not EVEN_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    unmasked_end = _unmasked_end(start_m, LK, BLOCK_N, CAUSAL)
    acc, total, row_max = _fwd_keys(
        acc, total, row_max, q, k_ptr, v_ptr, stride_kn, stride_vn, offs_m, 0, unmasked_end, LK, D, scale_log2,
        BLOCK_N, BLOCK_D, False, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    if HAS_TAIL:
        end = _visible_end(start_m, LK, BLOCK_M, CAUSAL)
        acc, total, row_max = _fwd_keys(
            acc, total, row_max, q, k_ptr, v_ptr, stride_kn, stride_vn, offs_m, unmasked_end, end, LK, D, scale_log2,
            BLOCK_N, BLOCK_D, True, CAUSAL, EVEN_D, PRECISION,
        )  # fmt: skip

    tl.store(lse_ptr + offs_m, row_max + tl.log2(total), mask=offs_m < LQ)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_d[None, :]
    tl.store(out_ptrs, out, mask=(offs_m < LQ)[:, None] & (offs_d < D)[None, :])


@triton.jit
def _attention_bwd_delta(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, H, LQ, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = sum of out * dout over each row, which softmax's gradient subtracts from that of every score."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_m < LQ)[:, None] & (offs_d < D)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    out_ptrs = out_ptr + b * stride_ob + h * stride_oh + rows * stride_om + offs_d[None, :]
    dout_ptrs = dout_ptr + b * stride_dob + h * stride_doh + rows * stride_dom + offs_d[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + tl.program_id(0).to(tl.int64) * LQ + offs_m, tl.sum(out * dout, axis=1), mask=offs_m < LQ)


@triton.jit
def _bwd_queries(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, stride_qm, stride_dom, offs_n, begin, end, LQ, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, EVEN_M: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of keys and values by the queries from `begin` to `end`; scores are transposed."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_q = offs_m[:, None] * stride_qm + offs_d[None, :]  # [BLOCK_M, BLOCK_D]
    offs_do = offs_m[:, None] * stride_dom + offs_d[None, :]
    q_ptr += tl.cast(begin, tl.int64) * stride_qm
    dout_ptr += tl.cast(begin, tl.int64) * stride_dom
    for start_m in range(begin, end, BLOCK_M):
        in_rows = offs_m < LQ - start_m
        q = _load(q_ptr + offs_q, in_rows, offs_d < D, not EVEN_M, not EVEN_D)
        lse = _load_row(lse_ptr + start_m + offs_m, in_rows, float("inf"), not EVEN_M)  # past the last query: p = 0
        s_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p_t = tl.exp2(s_t * scale_log2 - lse[None, :])
        if MASKED:
            p_t = tl.where((start_m + offs_m)[None, :] >= offs_n[:, None], p_t, 0.0)
        dout = _load(dout_ptr + offs_do, in_rows, offs_d < D, not EVEN_M, not EVEN_D)
        dv = tl.dot(p_t.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = _load_row(delta_ptr + start_m + offs_m, in_rows, 0.0, not EVEN_M)
        dp_t = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        if MASKED:  # a query without a finite result must not reach the keys it cannot see
            ds_t = tl.where(p_t == 0.0, 0.0, ds_t)
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision=PRECISION)
        q_ptr += BLOCK_M * stride_qm
        dout_ptr += BLOCK_M * stride_dom
    return dk, dv


@triton.jit
def _attention_bwd_dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, stride_qb, stride_qh, stride_qm, stride_kb,
    stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh,
    stride_dkn, stride_dvb, stride_dvh, stride_dvn, B, H, HKV, LQ, LK, D, scale, scale_log2, heads_at_once,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Causal: the first keys have the most queries, and come first.
    block, head = _block_and_head(tl.cdiv(LK, BLOCK_N), B * HKV, heads_at_once)
    b = (head // HKV).to(tl.int64)
    h_kv = (head % HKV).to(tl.int64)
    start_n = block * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    rows = offs_n.to(tl.int64)[:, None]
    k_ptrs = k_ptr + b * stride_kb + h_kv * stride_kh + rows * stride_kn + offs_d[None, :]
    v_ptrs = v_ptr + b * stride_vb + h_kv * stride_vh + rows * stride_vn + offs_d[None, :]
    k = _load(k_ptrs, offs_n < LK, offs_d < D, True, not EVEN_D)
    v = _load(v_ptrs, offs_n < LK, offs_d < D, True, not EVEN_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    group = H // HKV
    for member in range(group):  # one program sums over the query heads of these keys: no atomics
        h = h_kv * group + member
        q_head = q_ptr + b * stride_qb + h * stride_qh
        dout_head = dout_ptr + b * stride_dob + h * stride_doh
        lse_head = lse_ptr + (b * H + h) * LQ
        delta_head = delta_ptr + (b * H + h) * LQ
        first_unmasked = 0  # from here on the whole block is visible to every query
        if CAUSAL:
            first_unmasked = tl.cdiv(start_n + BLOCK_N - 1, BLOCK_M) * BLOCK_M
            dk, dv = _bwd_queries(
                dk, dv, k, v, q_head, dout_head, lse_head, delta_head, stride_qm, stride_dom, offs_n,
                start_n // BLOCK_M * BLOCK_M, tl.minimum(first_unmasked, LQ), LQ, D, scale_log2,
                BLOCK_M, BLOCK_D, True, EVEN_M, EVEN_D, PRECISION,
            )  # fmt: skip
        dk, dv = _bwd_queries(
            dk, dv, k, v, q_head, dout_head, lse_head, delta_head, stride_qm, stride_dom, offs_n,
            first_unmasked, LQ, LQ, D, scale_log2,
            BLOCK_M, BLOCK_D, False, EVEN_M, EVEN_D, PRECISION,
        )  # fmt: skip

    mask = (offs_n < LK)[:, None] & (offs_d < D)[None, :]
    dk_ptrs = dk_ptr + b * stride_dkb + h_kv * stride_dkh + rows * stride_dkn + offs_d[None, :]
    dv_ptrs = dv_ptr + b * stride_dvb + h_kv * stride_dvh + rows * stride_dvn + offs_d[None, :]
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_keys(
    dq, q, dout, lse, delta, k_ptr, v_ptr, stride_kn, stride_vn, offs_m, begin, end, LK, D, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a block of queries by the keys from `begin` to `end`."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = offs_n[:, None] * stride_kn + offs_d[None, :]  # [BLOCK_N, BLOCK_D]
    offs_v = offs_n[:, None] * stride_vn + offs_d[None, :]
    k_ptr += tl.cast(begin, tl.int64) * stride_kn
    v_ptr += tl.cast(begin, tl.int64) * stride_vn
    for start_n in range(begin, end, BLOCK_N):
        k = _load(k_ptr + offs_k, offs_n < LK - start_n, offs_d < D, MASKED, not EVEN_D)
        v = _load(v_ptr + offs_v, offs_n < LK - start_n, offs_d < D, MASKED, not EVEN_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where(_visible(offs_m, start_n + offs_n, LK, CAUSAL), p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        k_ptr += BLOCK_N * stride_kn
        v_ptr += BLOCK_N * stride_vn
    return dq


@triton.jit
def _attention_bwd_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh,
    stride_kn, stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh,
    stride_dqm, B, H, HKV, LQ, LK, D, scale, scale_log2, heads_at_once,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _, b, h, h_kv, start_m = _query_block(B, H, HKV, LQ, heads_at_once, BLOCK_M, CAUSAL)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows = offs_m.to(tl.int64)[:, None]
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh + rows * stride_qm + offs_d[None, :]
    dout_ptrs = dout_ptr + b * stride_dob + h * stride_doh + rows * stride_dom + offs_d[None, :]
    q = _load(q_ptrs, offs_m < LQ, offs_d < D, True, not EVEN_D)
    dout = _load(dout_ptrs, offs_m < LQ, offs_d < D, True, not EVEN_D)
    lse = tl.load(lse_ptr + (b * H + h) * LQ + offs_m, mask=offs_m < LQ, other=float("inf"))
    delta = tl.load(delta_ptr + (b * H + h) * LQ + offs_m, mask=offs_m < LQ, other=0.0)
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    unmasked_end = _unmasked_end(start_m, LK, BLOCK_N, CAUSAL)
    dq = _bwd_keys(
        dq, q, dout, lse, delta, k_ptr, v_ptr, stride_kn, stride_vn, offs_m, 0, unmasked_end, LK, D, scale_log2,
        BLOCK_N, BLOCK_D, False, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    if HAS_TAIL:
        end = _visible_end(start_m, LK, BLOCK_M, CAUSAL)
        dq = _bwd_keys(
            dq, q, dout, lse, delta, k_ptr, v_ptr, stride_kn, stride_vn, offs_m, unmasked_end, end, LK, D, scale_log2,
            BLOCK_N, BLOCK_D, True, CAUSAL, EVEN_D, PRECISION,
        )  # fmt: skip

    dq_ptrs = dq_ptr + b * stride_dqb + h * stride_dqh + rows * stride_dqm + offs_d[None, :]
    mask = (offs_m < LQ)[:, None] & (offs_d < D)[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
