"""Triton kernels of the cross entropies over rows of logits.

For a row z with target t (one-hot or probabilities), label smoothing s and class weights w, where
q_c = w_c ((1 - s) t_c + s / N):

    loss = sum of q_c (lse - z_c) + z_loss lse²,    lse = log sum exp z
    dloss/dz_c = A exp(z_c - lse) - q_c,            A = dloss/dlse = sum of q + 2 z_loss lse

The kernels compute losses, or losses with the gradients for an incoming gradient of 1, or gradients from lse and A.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilewright.ops._exp import exp


@triton.jit
def _load_logits(ptrs, mask, softcap, EVICT: tl.constexpr):
    """Load logits, -inf where masked; return them soft-capped, and the derivative of that by the loaded values."""
    x = tl.load(ptrs, mask=mask, other=-float("inf"), eviction_policy=EVICT).to(tl.float32)
    if softcap is None:
        return x, 1.0
    else:
        t = libdevice.tanh(x / softcap)
        return tl.where(mask, softcap * t, -float("inf")), 1.0 - t * t


@triton.jit
def _dense_target(target_ptr, weight_ptr, offs, offs_n, mask, smoothing, uniform, PROBS: tl.constexpr):
    """Return r, the part of q over all classes: all of it for probabilities, the smoothing for a class index."""
    if PROBS:
        r = tl.load(target_ptr + offs, mask=mask, other=0.0).to(tl.float32) * (1.0 - smoothing) + uniform
    else:
        r = tl.where(mask, uniform, 0.0)
    if weight_ptr is not None:
        r *= tl.load(weight_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, r, 0.0)


@triton.jit
def _target_weight(weight_ptr, y, is_class, is_counted, smoothing):
    """Return the part of q on the target class alone; NaN where the target is no valid class."""
    q_y = tl.where(is_counted, 1.0 - smoothing, 0.0)
    if weight_ptr is not None:
        q_y *= tl.load(weight_ptr + y, mask=is_class, other=0.0).to(tl.float32)
    return tl.where(is_counted & (is_class == 0), float("nan"), q_y)


@triton.jit
def _block_gradient(
    z, target_ptr, weight_ptr, offs, mask, y, row_max, A, scale, q_y, smoothing, uniform,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Return the gradient of logits of one row; A and q_y are scaled already."""
    dz = exp(z - row_max) * A
    if PROBS or SMOOTH:
        dz -= scale * _dense_target(target_ptr, weight_ptr, offs, offs, mask, smoothing, uniform, PROBS)
    if not PROBS:
        dz -= tl.where(offs == y, q_y, 0.0)
    return dz


@triton.jit
def _cross_entropy_tile(
    x_ptr, target_ptr, weight_ptr, divisor_ptr, dloss_ptr, loss_ptr, stats_ptr, dx_ptr, stride_dloss, M, N,
    ignore_index, smoothing, z_loss, softcap,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: logits are read once for losses, gradients, or both."""
    N = N // VECTOR * VECTOR  # unchanged, but tells the compiler the alignment of rows
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may exceed 2**31
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    is_row = offs_m < M
    is_counted = is_row
    if not PROBS:
        y = tl.load(target_ptr + offs_m, mask=is_row, other=ignore_index)
        is_counted = y != ignore_index
        is_class = is_counted & (y >= 0) & (y < N)
        q_y = _target_weight(weight_ptr, y, is_class, is_counted, smoothing)
        if loss_ptr is not None:  # before the reductions synchronize: the gradient may overwrite the logits
            zy = _load_logits(x_ptr + offs_m * N + y, is_class, softcap, "")[0]
        y = tl.where(is_class, y, N).to(tl.int32)
    mask = is_counted[:, None] & (offs_n < N)[None, :]
    z, slope = _load_logits(x_ptr + offs, mask, softcap, "evict_last")
    if PROBS or SMOOTH:
        r = _dense_target(target_ptr, weight_ptr, offs, offs_n[None, :], mask, smoothing, smoothing / N, PROBS)
    if loss_ptr is not None:
        m = tl.where(is_counted, tl.max(z, axis=1), 0.0)
        e = exp(z - m[:, None])
        total = tl.sum(e, axis=1)
        log_total = tl.log(total)
        lse = m + log_total
        A = 2.0 * z_loss * lse
        loss = z_loss * lse * lse
        if not PROBS:
            A += q_y
            loss += q_y * ((m - zy) + log_total)
        if PROBS or SMOOTH:
            r_sum = tl.sum(r, axis=1)
            A += r_sum
            loss += tl.sum(tl.where(mask, r * (m[:, None] - z), 0.0), axis=1) + r_sum * log_total
        tl.store(loss_ptr + offs_m, tl.where(is_counted, loss, 0.0).to(loss_ptr.dtype.element_ty), mask=is_row)
        if stats_ptr is not None:
            tl.store(stats_ptr + offs_m, tl.where(is_counted, lse, 0.0), mask=is_row)
            tl.store(stats_ptr + M + offs_m, tl.where(is_counted, A, 0.0), mask=is_row)
        A /= total
    else:
        m = tl.load(stats_ptr + offs_m, mask=is_row, other=0.0)
        A = tl.load(stats_ptr + M + offs_m, mask=is_row, other=0.0)
        e = exp(z - m[:, None])
    if dx_ptr is not None:
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
        if dloss_ptr is not None:
            scale = tl.load(dloss_ptr + offs_m * stride_dloss, mask=is_row, other=0.0).to(tl.float32)
        if divisor_ptr is not None:
            scale /= tl.load(divisor_ptr)
        scale = tl.where(is_counted, scale, 0.0)
        dx = e * tl.where(is_counted, A * scale, 0.0)[:, None]
        if PROBS or SMOOTH:
            dx -= r * scale[:, None]
        if not PROBS:
            dx -= tl.where(offs_n[None, :] == y[:, None], (q_y * scale)[:, None], 0.0)
        dx *= slope
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=is_row[:, None] & (offs_n < N)[None, :])


@triton.jit
def _cross_entropy_loop(
    x_ptr, target_ptr, weight_ptr, divisor_ptr, dloss_ptr, loss_ptr, stats_ptr, dx_ptr, stride_dloss, M, N,
    ignore_index, smoothing, z_loss, softcap,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, VECTOR: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A long row in blocks: one pass for its sum, a second one for its gradient, mostly from L2.

    Accesses are 16 bytes wide for every N: the up to VECTOR - 1 elements before the row's first aligned address and
    after its last are the edge, which is loaded separately.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: M * N may exceed 2**31
    begin = (row * N + VECTOR - 1) // VECTOR * VECTOR  # the first aligned element: offset 0 from here on
    head = (begin - row * N).to(tl.int32)
    body = ((row * N + N) // VECTOR * VECTOR - begin).to(tl.int32)
    is_counted = row >= 0
    q_y = 0.0
    y = head
    if not PROBS:
        y = tl.load(target_ptr + row)
        is_counted = y != ignore_index
        is_class = is_counted & (y >= 0) & (y < N)
        q_y = _target_weight(weight_ptr, y, is_class, is_counted, smoothing)
        if loss_ptr is not None:  # before the reductions synchronize: the gradient may overwrite the logits
            zy = _load_logits(x_ptr + row * N + y, is_class, softcap, "")[0]
        y = tl.where(is_class, y - head, N).to(tl.int32)
    x_ptr += begin
    target_ptr += begin
    if weight_ptr is not None:
        weight_ptr += head
    # The 16 bytes of a thread are one row of the block: reducing along it needs no other thread.
    offs = tl.arange(0, BLOCK_N // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    lanes = tl.arange(0, 2 * VECTOR)
    offs_edge = tl.where(lanes < VECTOR, lanes - head, lanes - VECTOR + body)
    in_edge = tl.where(lanes < VECTOR, offs_edge < 0, offs_edge < N - head)
    end = tl.where(is_counted, body, 0)  # an ignored row is not read
    reads_edge = in_edge & is_counted
    uniform = smoothing / N

    if loss_ptr is not None:
        m = tl.full([BLOCK_N // VECTOR], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_N // VECTOR], tl.float32)
        r_sums = tl.zeros([BLOCK_N // VECTOR], tl.float32)
        rz_sums = tl.zeros([BLOCK_N // VECTOR], tl.float32)
        KEEP: tl.constexpr = "evict_first" if dx_ptr is None else "evict_last"
        for start in range(0, end, BLOCK_N):
            offs_n = start + offs
            mask = offs_n < end
            z = _load_logits(x_ptr + offs_n, mask, softcap, KEEP)[0]
            new_max = tl.maximum(m, tl.max(z, axis=1))
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # avoids -inf + inf, which is NaN
            total = total * exp(m - shift) + tl.sum(exp(z - shift[:, None]), axis=1)
            m = new_max
            if PROBS or SMOOTH:
                r = _dense_target(target_ptr, weight_ptr, offs_n, offs_n, mask, smoothing, uniform, PROBS)
                r_sums += tl.sum(r, axis=1)
                rz_sums += tl.sum(tl.where(mask, r * z, 0.0), axis=1)
        row_max = tl.max(m, axis=0)
        if not IS_ALIGNED:
            z_edge = _load_logits(x_ptr + offs_edge, reads_edge, softcap, "")[0]
            row_max = tl.maximum(row_max, tl.max(z_edge, axis=0))
        shift = tl.where(row_max == -float("inf"), 0.0, row_max)
        row_sum = tl.sum(total * exp(m - shift), axis=0)
        if not IS_ALIGNED:
            row_sum += tl.sum(exp(z_edge - shift), axis=0)
        lse = row_max + tl.log(row_sum)
        A = 2.0 * z_loss * lse
        loss = z_loss * lse * lse
        if not PROBS:
            A += q_y
            loss += q_y * ((row_max - zy) + tl.log(row_sum))
        if PROBS or SMOOTH:
            r_sum = tl.sum(r_sums, axis=0)
            rz_sum = tl.sum(rz_sums, axis=0)
            if not IS_ALIGNED:
                r = _dense_target(target_ptr, weight_ptr, offs_edge, offs_edge, reads_edge, smoothing, uniform, PROBS)
                r_sum += tl.sum(r, axis=0)
                rz_sum += tl.sum(tl.where(reads_edge, r * z_edge, 0.0), axis=0)
            A += r_sum
            loss += r_sum * lse - rz_sum
        tl.store(loss_ptr + row, tl.where(is_counted, loss, 0.0).to(loss_ptr.dtype.element_ty))
        if stats_ptr is not None:
            tl.store(stats_ptr + row, tl.where(is_counted, lse, 0.0))
            tl.store(stats_ptr + M + row, tl.where(is_counted, A, 0.0))
        A /= row_sum
    else:
        row_max = tl.load(stats_ptr + row)
        A = tl.load(stats_ptr + M + row)

    if dx_ptr is not None:
        dx_ptr += begin
        scale = 1.0
        if dloss_ptr is not None:
            scale = tl.load(dloss_ptr + row * stride_dloss).to(tl.float32)
        if divisor_ptr is not None:
            scale /= tl.load(divisor_ptr)
        scale = tl.where(is_counted, scale, 0.0)
        A = tl.where(is_counted, A * scale, 0.0)
        q_y = tl.where(is_counted, q_y * scale, 0.0)
        row_max = tl.where(is_counted, row_max, 0.0)
        for done in range(0, body, BLOCK_N):  # backwards, since L2 holds the end of the row
            offs_n = (tl.cdiv(body, BLOCK_N) - 1) * BLOCK_N - done + offs
            z, slope = _load_logits(x_ptr + offs_n, offs_n < end, softcap, "evict_first")
            dx = _block_gradient(
                z, target_ptr, weight_ptr, offs_n, offs_n < end, y, row_max, A, scale, q_y, smoothing, uniform,
                PROBS, SMOOTH,
            )  # fmt: skip
            tl.store(dx_ptr + offs_n, (dx * slope).to(dx_ptr.dtype.element_ty), mask=offs_n < body)
        if not IS_ALIGNED:
            z, slope = _load_logits(x_ptr + offs_edge, reads_edge, softcap, "")
            dx = _block_gradient(
                z, target_ptr, weight_ptr, offs_edge, reads_edge, y, row_max, A, scale, q_y, smoothing, uniform,
                PROBS, SMOOTH,
            )  # fmt: skip
            tl.store(dx_ptr + offs_edge, (dx * slope).to(dx_ptr.dtype.element_ty), mask=in_edge)


@triton.jit
def _count_targets(target_ptr, weight_ptr, divisor_ptr, M, N, part, ignore_index, BLOCK_M: tl.constexpr):
    """Count the targets of each part that are not ignored, or sum their class weights."""
    start = tl.program_id(0).to(tl.int64) * part
    length = tl.minimum(part, M - start).to(tl.int32)  # int32 offsets take half the registers
    target_ptr += start
    total = tl.zeros([BLOCK_M], tl.float32)
    for begin in range(0, length, BLOCK_M):
        offs_m = begin + tl.arange(0, BLOCK_M)
        y = tl.load(target_ptr + offs_m, mask=offs_m < length, other=ignore_index)
        is_counted = y != ignore_index
        if weight_ptr is not None:
            total += tl.load(weight_ptr + y, mask=is_counted & (y >= 0) & (y < N), other=0.0).to(tl.float32)
        else:
            total += is_counted.to(tl.float32)
    tl.store(divisor_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _sum_losses(loss_ptr, divisor_ptr, out_ptr, M, part, BLOCK_M: tl.constexpr):
    """Sum the losses of each part; divide by the divisor if there is one."""
    start = tl.program_id(0).to(tl.int64) * part
    end = tl.minimum(start + part, M)
    total = tl.zeros([BLOCK_M], tl.float32)
    for begin in range(start, end, BLOCK_M):
        offs_m = begin + tl.arange(0, BLOCK_M)
        total += tl.load(loss_ptr + offs_m, mask=offs_m < end, other=0.0)
    loss = tl.sum(total, axis=0)
    if divisor_ptr is not None:
        loss /= tl.load(divisor_ptr)
    tl.store(out_ptr + tl.program_id(0), loss.to(out_ptr.dtype.element_ty))


@triton.jit
def _scale(x_ptr, by_ptr, N, BLOCK_N: tl.constexpr):
    """Multiply x by a number in device memory. It mostly is 1, and then no memory is accessed."""
    by = tl.load(by_ptr).to(tl.float32)
    if by != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            offs_n = tl.cast(block, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + offs_n, mask=offs_n < N).to(tl.float32)
            tl.store(x_ptr + offs_n, (x * by).to(x_ptr.dtype.element_ty), mask=offs_n < N)
