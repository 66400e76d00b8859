"""Flash attention forward in Gluon for Hopper: a producer warp with TMA, and two consumer warpgroups with wgmma.

Blocks of keys and values pass through rings of STAGES slots in shared memory, as slices of a GEMM do
(`ops/linear/_gluon.py`). Each consumer holds half of a block of queries. Tensors are contiguous 16-bit floats and
described as matrices [batch * heads * length, D]; lengths are multiples of the blocks, so that a block never reaches
into the next head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.ops.linear._gluon import GLUON_DTYPES, _barriers, _next_slot, _slots
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.launch import DescribedLaunch, Matrix

BYTES = gl.constexpr(2)  # per element
UPPER, LOWER = gl.constexpr(0), gl.constexpr(1)  # halves of a block of queries
HEADS = (64, 128)
BLOCK_M, BLOCK_N, STAGES = 128, 128, 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
LOG2_E = 1.4426950408889634


@gluon.jit
def _keys_end(start_m, LK, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many blocks of keys a block of queries visits."""
    blocks = LK // BLOCK_N
    if CAUSAL:
        blocks = gl.minimum(blocks, gl.cdiv(start_m + BLOCK_M, BLOCK_N))
    return blocks


@gluon.jit
def _place(H, HKV, LQ, LK, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the head of this program over all batches, its first query, and the rows where its keys begin."""
    blocks = LQ // BLOCK_M
    head = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    first_key = (head // H * HKV + head % H // (H // HKV)) * LK
    return head, block * BLOCK_M, first_key


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, H, HKV, LQ, LK,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The producer: copy the queries, then keys and values as their slots become empty."""
    head, start_m, first_key = _place(H, HKV, LQ, LK, BLOCK_M, CAUSAL)
    HALF: gl.constexpr = BLOCK_M // 2
    for half in gl.static_range(2):
        mbarrier.expect(q_full.index(half), HALF * BLOCK_D * BYTES)
        row = head * LQ + start_m + half * HALF
        tma.async_copy_global_to_shared(q_desc, [row, 0], q_full.index(half), q_smem.index(half))
    slot, phase = 0, 1  # all slots are empty
    for block in range(_keys_end(start_m, LK, BLOCK_M, BLOCK_N, CAUSAL)):
        row = first_key + block * BLOCK_N
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), BLOCK_N * BLOCK_D * BYTES)
        tma.async_copy_global_to_shared(k_desc, [row, 0], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), BLOCK_N * BLOCK_D * BYTES)
        tma.async_copy_global_to_shared(v_desc, [row, 0], v_full.index(slot), v_smem.index(slot))
        slot, phase = _next_slot(slot, phase, STAGES)


@gluon.jit
def _masked(s, offs_m, start_m, start_n, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Hide the keys after each query, in blocks on the diagonal."""
    if CAUSAL:  # noqa: SIM102  decided at compile time
        if start_n + BLOCK_N > start_m + 1:
            offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
            s = gl.where(gl.expand_dims(offs_m, 1) >= gl.expand_dims(offs_n, 0), s, -float("inf"))
    return s


@gluon.jit
def _softmax_step(s, row_max, total, scale_log2):
    """Continue the online softmax: return probabilities, what rescales earlier sums, and the new maximum and total."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(new_max, 1))
    rescale = gl.exp2(row_max - new_max)
    return p, rescale, new_max, total * rescale + gl.sum(p, 1)


@gluon.jit
def _by_row(x, acc):
    """Return one value per row in the layout of the rows of acc, which the same threads hold."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def _consume(
    out_desc, lse_ptr, q_smem, k_smem, v_smem, out_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
    H, HKV, LQ, LK, scale_log2, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, FORM: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A consumer: online softmax of its half of the queries. Probabilities stay in registers between the products."""
    ROWS: gl.constexpr = BLOCK_M // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(  # pyright: ignore[reportAssignmentType]
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(  # pyright: ignore[reportAssignmentType]
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_D, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)  # pyright: ignore[reportAssignmentType]
    head, first_m, _first_key = _place(H, HKV, LQ, LK, BLOCK_M, CAUSAL)
    blocks = _keys_end(first_m, LK, BLOCK_M, BLOCK_N, CAUSAL)
    start_m = first_m + HALF * ROWS
    offs_m = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, out_layout)
    q = q_smem.index(HALF)
    mbarrier.wait(q_full.index(HALF), 0)
    slot, phase = 0, 0
    if FORM == "cooperative":
        for block in range(blocks):
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            s = _masked(s, offs_m, start_m, block * BLOCK_N, BLOCK_N, CAUSAL)
            p, rescale, row_max, total = _softmax_step(s, row_max, total, scale_log2)
            acc *= _by_row(rescale, acc)
            p = gl.convert_layout(p.to(v_smem.dtype), p_layout)
            mbarrier.wait(v_full.index(slot), phase)
            acc = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(v_empty.index(slot), count=1)
            slot, phase = _next_slot(slot, phase, STAGES)
    else:
        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_empty.index(0), count=1)
        s = _masked(s, offs_m, start_m, 0, BLOCK_N, CAUSAL)
        p, rescale, row_max, total = _softmax_step(s, row_max, total, scale_log2)
        p = gl.convert_layout(p.to(v_smem.dtype), p_layout)
        turn = 1 - HALF  # the upper half begins at once
        for block in range(1, blocks):  # the scores of this block, and the values of the one before
            mbarrier.wait(turns.index(HALF), turn)
            k_slot, k_phase = _next_slot(slot, phase, STAGES)
            mbarrier.wait(k_full.index(k_slot), k_phase)
            s = warpgroup_mma(q, k_smem.index(k_slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), phase)
            acc = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF), count=1)
            turn ^= 1
            if FORM == "overlapped":
                s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            else:
                s, acc = warpgroup_mma_wait(num_outstanding=0, deps=(s, acc))
            mbarrier.arrive(k_empty.index(k_slot), count=1)
            s = _masked(s, offs_m, start_m, block * BLOCK_N, BLOCK_N, CAUSAL)
            new_p, rescale, row_max, total = _softmax_step(s, row_max, total, scale_log2)
            if FORM == "overlapped":
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(v_empty.index(slot), count=1)
            acc *= _by_row(rescale, acc)
            p = gl.convert_layout(new_p.to(v_smem.dtype), p_layout)
            slot, phase = k_slot, k_phase
        mbarrier.wait(v_full.index(slot), phase)
        acc = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    gl.store(lse_ptr + head.to(gl.int64) * LQ + offs_m, row_max + gl.log2(total))
    acc /= _by_row(total, acc)
    out = out_smem.index(HALF)
    out.store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [head * LQ + start_m, 0], out)
    tma.store_wait(pendings=0)


@gluon.jit
def _attention_specialized(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, H, HKV, LQ, LK, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    FORM: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One warp copies, and two warpgroups multiply and compute exponentials, each for half of the queries.

    cooperative: the consumers share the keys, and wait for each other nowhere else.
    pingpong: they take turns with the tensor cores, so that one computes exponentials while the other multiplies. A
        turn is the scores of one block and the values of the block before.
    overlapped: a consumer also computes exponentials while its own product with the values still runs.
    """
    q_smem, k_smem, v_smem = _slots(q_desc, 2), _slots(k_desc, STAGES), _slots(v_desc, STAGES)
    out_smem = _slots(out_desc, 2)
    q_full, k_full, v_full = _barriers(1, 2), _barriers(1, STAGES), _barriers(1, STAGES)
    k_empty, v_empty, turns = _barriers(2, STAGES), _barriers(2, STAGES), _barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, lse_ptr, q_smem, k_smem, v_smem, out_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                H, HKV, LQ, LK, scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, CAUSAL, FORM, UPPER,
            )),
            (_consume, (
                out_desc, lse_ptr, q_smem, k_smem, v_smem, out_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                H, HKV, LQ, LK, scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, CAUSAL, FORM, LOWER,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                H, HKV, LQ, LK, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, CAUSAL,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel takes these tensors: contiguous, 16 bits, and lengths that are multiples of blocks."""
    return (
        q.dtype in GLUON_DTYPES
        and q.shape[-1] in HEADS
        and k.shape == v.shape
        and q.shape[2] % BLOCK_M == 0
        and k.shape[2] % BLOCK_N == 0
        and min(q.numel(), k.numel()) > 0
        and max(q.numel(), k.numel()) // q.shape[-1] < 2**31  # rows of the matrices that TMA copies
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
    )


@cached_plan
def _plan(
    form: str, q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, device: int, causal: bool, scale: float
) -> DescribedLaunch:
    """Return the launch that takes q, k, v, out and lse."""
    (B, H, LQ, D), (HKV, LK) = q, k[1:3]

    def rows(length: int, block: int) -> Matrix:
        layout = gl.NVMMASharedLayout.get_default_for([block, D], GLUON_DTYPES[dtype])
        return Matrix((length, D), D, (block, D), layout)

    queries, keys = rows(B * H * LQ, BLOCK_M // 2), rows(B * HKV * LK, BLOCK_N)
    return DescribedLaunch(
        _attention_specialized, (LQ // BLOCK_M * B * H,), (queries, keys, keys, queries, None),
        H, HKV, LQ, LK, scale * LOG2_E, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=D, STAGES=STAGES, CAUSAL=causal,
        FORM=form, CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip


def attention(form: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the base-2 log-sum-exp of tensors that `fits` accepts, on a Hopper.

    `form` is "cooperative", "pingpong" or "overlapped".
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _plan(form, q.shape, k.shape, q.dtype, q.get_device(), causal, scale)(q, k, v, out, lse)
    return out, lse
