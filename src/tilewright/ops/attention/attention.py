"""Attention: softmax(q kᵀ / √d) v, over all keys or, if causal, over those not after the query.

The scores never reach memory (flash attention): a program keeps a block of queries, iterates over the keys, and
rescales its sums whenever a larger score appears. Backward recomputes the scores from the log-sum-exp of each row.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import Launcher, shared_memory
from tilewright.runtime.operator import scatter
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["scaled_dot_product_attention"]

MAX_HEAD = 256


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention in torch operations; the number of heads of q is a multiple of that of k and v."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * scale  # [B, H, LQ, LK]
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attend(q, k, v, causal, q.shape[-1] ** -0.5)


def _scores(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the number of pairs of a query and a visible key."""
    LQ, LK = q.shape[2], k.shape[2]
    short = min(LQ, LK)  # queries with one visible key more than the query before
    return q.shape[0] * q.shape[1] * (short * (short + 1) // 2 + (LQ - short) * LK if causal else LQ * LK)


def cost(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Cost:
    scores = _scores(q, k, causal)
    return Cost(
        read=q.nbytes + k.nbytes + v.nbytes,
        written=q.nbytes,
        flops={matrix_unit(q.dtype): 4 * scores * q.shape[-1], "special": scores},
    )


def backward_cost(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Cost:
    scores = _scores(q, k, causal)
    lse = 4 * q.numel() // q.shape[-1]
    return Cost(
        read=3 * q.nbytes + k.nbytes + v.nbytes + lse,  # q, out, dout
        written=q.nbytes + k.nbytes + v.nbytes,
        flops={matrix_unit(q.dtype): 10 * scores * q.shape[-1], "special": scores},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor, bool]:
    q = draw.randn("B", "H", "LQ", "D")
    return q, draw.randn("B", "HKV", "LK", "D"), draw.randn("B", "HKV", "LK", "D"), draw["causal"]


op = Op(
    "attention",
    reference,
    cost,
    inputs=inputs,
    takes=lambda case: case["HKV"] > 0 and case["H"] % case["HKV"] == 0,
    check=points(
        B=(1, 2, 1, 1, 1, 1, 1, 1),
        H=(1, 1, 4, 2, 4, 1, 2, 1),
        HKV=(1, 1, 2, 2, 1, 1, 1, 1),
        LQ=(1, 17, 64, 130, 17, 130, 200, 33),
        LK=(17, 17, 64, 130, 130, 17, 300, 17),
        D=(8, 16, 64, 40, 16, 64, 128, 256),
        causal=(False, True, True, False, True, True, True, False),
    ),
    bench=points(
        B=(4, 4, 4, 4, 16, 16, 1, 1, 4),
        H=(16, 16, 32, 32, 16, 16, 16, 16, 32),
        HKV=(16, 16, 32, 32, 16, 16, 16, 16, 8),
        LQ=(4096, 4096, 4096, 4096, 1024, 1024, 8192, 8192, 4096),
        LK=(4096, 4096, 4096, 4096, 1024, 1024, 8192, 8192, 4096),
        D=(128, 128, 64, 64, 128, 128, 128, 128, 128),
        causal=(False, True, False, True, False, True, False, True, True),
    ),
    backward_cost=backward_cost,
    batch="B",
)


def _same_lengths_if_causal(q: Tensor, k: Tensor, causal: bool) -> bool:
    return not causal or q.shape[2] == k.shape[2]  # torch's kernels place the diagonal elsewhere


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    D, has_rows = q.shape[-1], all(x.stride(-1) == 1 and x.storage_offset() % 8 == 0 for x in (q, k, v))
    small = D <= 256 and D % 8 == 0 and q.shape[0] < 2**16  # the batch is a grid dimension
    return q.dtype != torch.float32 and small and has_rows and _same_lengths_if_causal(q, k, causal)


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    return _fits_flash(q, k, v, causal) and q.shape[-1] <= 128 and k.shape[2] > 1


def _torch_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


@op.kernel("sdpa-flash", language="cuda", fits=_fits_flash, origin="baseline")
def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _torch_backend(SDPBackend.FLASH_ATTENTION, q, k, v, causal)


@op.kernel("sdpa-cudnn", language="cuda", fits=_fits_cudnn, origin="baseline")
def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _torch_backend(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)


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


# BLOCK_M, BLOCK_N, num_warps, num_stages by the largest head size: for LARGE_SHARED memory, for less, and for fp32.
LARGE = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 128, 8, 3), 256: (128, 64, 8, 2)},
    "dkdv": {64: (64, 64, 8, 3), 128: (32, 128, 8, 1), 256: (32, 32, 8, 2)},
    "dq": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
}
SMALL = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    "dkdv": {64: (32, 64, 4, 2), 128: (32, 64, 8, 1), 256: (16, 32, 8, 2)},
    "dq": {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (32, 32, 4, 2)},
}
FP32 = {
    "fwd": {64: (64, 32, 8, 2), 128: (64, 16, 8, 2), 256: (32, 16, 8, 2)},
    "dkdv": {64: (32, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 16, 8, 2)},
    "dq": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 16, 8, 2)},
}
LARGE_SHARED = 227 * 1024  # bytes of shared memory per program, as on an H200
DELTA_ROWS = 64
L2_SHARE = 32 * 2**20  # bytes: about half of an H200's L2, since the other tensors stream through it
LOG2_E = 1.0 / math.log(2.0)


def _blocks(m: int, n: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}


def _default(kernel: str, size: int, head: int, is_large: bool) -> Config:
    return _blocks(*(FP32 if size == 4 else LARGE if is_large else SMALL)[kernel][head])


def _choices(kernel: str, size: int, head: int, is_large: bool) -> list[Config]:
    sides = [n for n in (16, 32, 64, 128) if n * head * size <= 2**15]
    return [_blocks(m, n, w, s) for m in sides for n in sides for w in (4, 8) for s in (1, 2, 3) if m * n >= 1024]


BLOCKS = ConfigTable("attention.json", _default, _choices)
_launch_fwd = Launcher(_attention_fwd)
_launch_delta = Launcher(_attention_bwd_delta)
_launch_dkdv = Launcher(_attention_bwd_dkdv)
_launch_dq = Launcher(_attention_bwd_dq)


def _config(kernel: str, q: Tensor, is_causal: bool) -> Config:
    D = q.shape[-1]
    head = next(largest for largest in FP32[kernel] if largest >= D)
    block_d = max(16, next_power_of_2(D))
    return {
        **BLOCKS(q, kernel, q.element_size(), head, shared_memory(q.get_device()) >= LARGE_SHARED),
        "BLOCK_D": block_d,
        "CAUSAL": is_causal,
        "EVEN_D": block_d == D,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }


def _heads_at_once(heads: int, streamed: Tensor, is_causal: bool) -> int:
    """Return how many heads run side by side; `streamed` is one of the two tensors that every program iterates over.

    Causal programs differ in length. The longest ones of many heads start first, as long as the streamed tensors of
    these heads stay in L2.
    """
    return min(heads, max(1, L2_SHARE * heads // (2 * streamed.nbytes))) if is_causal else 1


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows, close enough for int32 offsets inside a block; a copy only where needed."""
    return x if x.stride(-1) == 1 and x.stride(-2) < 2**23 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _empty_output(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tilewright::attention", mutates_args=())
def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output, laid out as q, and the base-2 log-sum-exp of each row of scores. No tensor may be empty."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _empty_output(q)
    (B, H, LQ, D), (HKV, LK) = q.shape, k.shape[1:3]
    config = _config("fwd", q, is_causal)
    _launch_fwd(
        (cdiv(LQ, config["BLOCK_M"]) * B * H,),
        q, k, v, out, lse, *_strides(q, k, v, out), B, H, HKV, LQ, LK, D, scale * LOG2_E,
        _heads_at_once(B * H, k, is_causal), HAS_TAIL=is_causal or LK % config["BLOCK_N"] != 0, **config,
    )  # fmt: skip
    return out, lse


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, wants_q, wants_kv = args
    dq = torch.empty_like(_rows(q)) if wants_q else q.new_empty(0)
    dk, dv = (torch.empty_like(_rows(x)) if wants_kv else x.new_empty(0) for x in (k, v))
    return dq, dk, dv


@torch.library.custom_op("tilewright::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float,
    wants_q: bool,
    wants_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those that are not wanted are empty."""
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    (B, H, LQ, D), (HKV, LK) = q.shape, k.shape[1:3]
    dq, dk, dv = _empty_gradients(q, k, v, wants_q, wants_kv)
    delta = torch.empty_like(lse)
    sizes = (B, H, HKV, LQ, LK, D, scale, scale * LOG2_E)
    _launch_delta(
        (B * H, cdiv(LQ, DELTA_ROWS)),
        out, dout, delta, *_strides(out, dout), H, LQ, D, BLOCK_M=DELTA_ROWS, BLOCK_D=next_power_of_2(D),
    )  # fmt: skip
    if wants_kv:
        config = _config("dkdv", q, is_causal)
        _launch_dkdv(
            (cdiv(LK, config["BLOCK_N"]) * B * HKV,),
            q, k, v, dout, lse, delta, dk, dv, *_strides(q, k, v, dout, dk, dv), *sizes,
            _heads_at_once(B * HKV, q, is_causal), EVEN_M=LQ % config["BLOCK_M"] == 0, **config,
        )  # fmt: skip
    if wants_q:
        config = _config("dq", q, is_causal)
        _launch_dq(
            (cdiv(LQ, config["BLOCK_M"]) * B * H,),
            q, k, v, dout, lse, delta, dq, *_strides(q, k, v, dout, dq), *sizes,
            _heads_at_once(B * H, k, is_causal), HAS_TAIL=is_causal or LK % config["BLOCK_N"] != 0, **config,
        )  # fmt: skip
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # double backward: torch differentiates the formula again
        q, k, v = (x.view_as(x) for x in (q, k, v))  # distinct, even if one tensor is passed as several of them
        again = attend(q, k, v, *ctx.options)
        leaves = [*itertools.compress((q, k, v), wanted)]
        gradients = torch.autograd.grad(again, leaves, dout, create_graph=True)
    else:
        found = attention_backward(q, k, v, out, lse, dout, *ctx.options, wanted[0], wanted[1] or wanted[2])
        gradients = itertools.compress(found, wanted)
    return *scatter(gradients, wanted), None, None


attention_forward.register_fake(_empty_output)
attention_backward.register_fake(_empty_gradients)
attention_forward.register_autograd(_backward, setup_context=_save)


def _fits(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    return q.numel() > 0 and k.numel() > 0 and q.shape[-1] <= MAX_HEAD


@op.kernel("triton", language="triton", fits=_fits)
def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attention_forward(q, k, v, causal, q.shape[-1] ** -0.5)[0]


SMALLEST = math.inf  # pairs of a query and a key; cuDNN, which torch calls, wins every recorded case


def _is_eligible(query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool) -> bool:
    return (
        query.dim() == key.dim() == 4
        and query.shape[2] * key.shape[2] >= SMALLEST
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % max(1, key.shape[1]) == 0))
        and (scale is None or 0 < scale < math.inf)
        and _fits(query, key, value, False)
        and eligible(query, key, value)
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention, with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""
    if attn_mask is None and dropout_p == 0.0 and _is_eligible(query, key, value, scale, enable_gqa):
        return attention_forward(query, key, value, is_causal, query.shape[3] ** -0.5 if scale is None else scale)[0]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
