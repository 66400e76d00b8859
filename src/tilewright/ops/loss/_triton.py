"""What the cross entropies share: the formula, and the kernels that take logits by rows.

Of a row z with the target t, one hot or probabilities, smoothing s and class weights w, with q_c = w_c ((1 - s) t_c +
s / N):

    loss = sum of q_c (lse - z_c) + z_loss lse²,    lse = log sum exp z
    dloss/dz_c = A exp(z_c - lse) - q_c,            A = dloss/dlse = sum of q + 2 z_loss lse

A kernel makes of rows one of three things: losses, losses with gradients for an incoming gradient of 1, or gradients
from lse and A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tilewright.ops._exp import exp
from tilewright.runtime.clusters import (
    VECTOR,
    VECTORS_PER_THREAD,
    Rows,
    cluster_choices,
    cluster_default,
    cluster_launch,
)
from tilewright.runtime.configs import ConfigTable, cached_plan
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import MAX_INT32, Launcher, PreparedLaunch
from tilewright.runtime.sizes import cdiv, next_power_of_2

IGNORED = -100  # the target that torch ignores unless told otherwise
REDUCTIONS = ("none", "mean", "sum")


class Options(NamedTuple):
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


def formula(logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, options: Options) -> Tensor:
    """Cross entropy as torch has it, of capped logits, with the z-loss added."""
    cap = options.softcap
    z = logits if cap is None else cap * torch.tanh(logits / cap)
    loss = torch.nn.functional.cross_entropy(
        z,
        target,
        weight,
        ignore_index=options.ignore_index,
        reduction=reduction,
        label_smoothing=options.label_smoothing,
    )
    if not options.z_loss:
        return loss
    squares = options.z_loss * torch.logsumexp(z, min(1, z.dim() - 1)).square()
    if target.is_floating_point():
        return loss + (squares if reduction == "none" else squares.sum() if reduction == "sum" else squares.mean())
    ignored = target == options.ignore_index
    squares = squares.masked_fill(ignored, 0)
    if reduction == "none":
        return loss + squares
    if reduction == "sum":
        return loss + squares.sum()
    each = torch.ones_like(squares) if weight is None else weight[target.masked_fill(ignored, 0)]
    return loss + squares.sum() / each.masked_fill(ignored, 0).sum()


def validate(z_loss: float, softcap: float | None) -> None:
    """What torch's cross entropy does not have, so that it cannot complain."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if not isinstance(z_loss, (int, float)):
        raise TypeError(f"z_loss must be a number, not {type(z_loss).__name__}")


def takes(
    smallest: int,
    shape: torch.Size,
    floats: Sequence[Tensor],
    target: Any,
    weight: Any,
    reduction: str,
    options: Options,
) -> bool:
    """Whether the kernels can take logits of this shape, which `floats` make, as torch would: rows of classes with an
    index or probabilities for each."""
    if not isinstance(target, Tensor) or len(shape) not in (1, 2):
        return False
    if shape.numel() < max(1, smallest) or shape[-1] > MAX_INT32:
        return False
    floats = [*floats]
    if target.dtype == torch.int64:
        fits = target.shape == shape[:-1] and target.device == floats[0].device and type(target) is Tensor
    else:
        fits = target.shape == shape and not target.requires_grad
        floats.append(target)
    if weight is not None:
        fits = fits and isinstance(weight, Tensor) and weight.shape == shape[-1:] and not weight.requires_grad
        floats.append(weight)
    known = reduction in REDUCTIONS and isinstance(options.ignore_index, int) and 0 <= options.label_smoothing <= 1
    return fits and known and eligible(*floats)


@triton.jit
def _logits(ptrs, mask, cap, EVICT: tl.constexpr):
    """Logits as they count, -inf where there are none; and their slope in what was read."""
    x = tl.load(ptrs, mask=mask, other=-float("inf"), eviction_policy=EVICT).to(tl.float32)
    if cap is None:
        return x, 1.0
    else:
        t = libdevice.tanh(x / cap)
        return tl.where(mask, cap * t, -float("inf")), 1.0 - t * t


@triton.jit
def _spread(target_ptr, weight_ptr, offs, offs_n, mask, smoothing, share, PROBS: tl.constexpr):
    """The part of q that lies on all classes: all of it for probabilities, that of smoothing for an index."""
    if PROBS:
        r = tl.load(target_ptr + offs, mask=mask, other=0.0).to(tl.float32) * (1.0 - smoothing) + share
    else:
        r = tl.where(mask, share, 0.0)
    if weight_ptr is not None:
        r *= tl.load(weight_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, r, 0.0)


@triton.jit
def _peak(weight_ptr, y, is_class, counts, smoothing):
    """The part of q that lies on the target alone; NaN where that is no class."""
    peak = tl.where(counts, 1.0 - smoothing, 0.0)
    if weight_ptr is not None:
        peak *= tl.load(weight_ptr + y, mask=is_class, other=0.0).to(tl.float32)
    return tl.where(counts & (is_class == 0), float("nan"), peak)


@triton.jit
def _block_gradient(
    z,
    target_ptr,
    weight_ptr,
    offs,
    mask,
    y,
    largest,
    A,
    scale,
    peak,
    smoothing,
    share,
    PROBS: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """The gradient of logits of one row; A and peak are scaled already."""
    dz = exp(z - largest) * A
    if PROBS or SMOOTH:
        dz -= scale * _spread(target_ptr, weight_ptr, offs, offs, mask, smoothing, share, PROBS)
    if not PROBS:
        dz -= tl.where(offs == y, peak, 0.0)
    return dz


@triton.jit
def _cross_entropy_tile(
    x_ptr,
    target_ptr,
    weight_ptr,
    divisor_ptr,
    dloss_ptr,
    loss_ptr,
    stats_ptr,
    dx_ptr,
    stride_dloss,
    M,
    N,
    ignore_index,
    smoothing,
    z_loss,
    cap,
    PROBS: tl.constexpr,
    SMOOTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Whole rows in registers: logits are read once, whatever is made of them."""
    N = N // VECTOR * VECTOR  # the same: now the compiler sees how rows are aligned
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may pass 2**31
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    is_row = offs_m < M
    counts = is_row
    if not PROBS:
        y = tl.load(target_ptr + offs_m, mask=is_row, other=ignore_index)
        counts = y != ignore_index
        is_class = counts & (y >= 0) & (y < N)
        peak = _peak(weight_ptr, y, is_class, counts, smoothing)
        if loss_ptr is not None:  # before threads wait for each other: the gradient may lie where the logits lie
            zy = _logits(x_ptr + offs_m * N + y, is_class, cap, "")[0]
        y = tl.where(is_class, y, N).to(tl.int32)
    mask = counts[:, None] & (offs_n < N)[None, :]
    z, slope = _logits(x_ptr + offs, mask, cap, "evict_last")
    if PROBS or SMOOTH:
        r = _spread(target_ptr, weight_ptr, offs, offs_n[None, :], mask, smoothing, smoothing / N, PROBS)
    if loss_ptr is not None:
        m = tl.where(counts, tl.max(z, axis=1), 0.0)
        e = exp(z - m[:, None])
        total = tl.sum(e, axis=1)
        log_total = tl.log(total)
        lse = m + log_total
        A = 2.0 * z_loss * lse
        loss = z_loss * lse * lse
        if not PROBS:
            A += peak
            loss += peak * ((m - zy) + log_total)
        if PROBS or SMOOTH:
            mass = tl.sum(r, axis=1)
            A += mass
            loss += tl.sum(tl.where(mask, r * (m[:, None] - z), 0.0), axis=1) + mass * log_total
        tl.store(loss_ptr + offs_m, tl.where(counts, loss, 0.0).to(loss_ptr.dtype.element_ty), mask=is_row)
        if stats_ptr is not None:
            tl.store(stats_ptr + offs_m, tl.where(counts, lse, 0.0), mask=is_row)
            tl.store(stats_ptr + M + offs_m, tl.where(counts, A, 0.0), mask=is_row)
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
        scale = tl.where(counts, scale, 0.0)
        dx = e * tl.where(counts, A * scale, 0.0)[:, None]
        if PROBS or SMOOTH:
            dx -= r * scale[:, None]
        if not PROBS:
            dx -= tl.where(offs_n[None, :] == y[:, None], (peak * scale)[:, None], 0.0)
        dx *= slope
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=is_row[:, None] & (offs_n < N)[None, :])


@triton.jit
def _cross_entropy_loop(
    x_ptr,
    target_ptr,
    weight_ptr,
    divisor_ptr,
    dloss_ptr,
    loss_ptr,
    stats_ptr,
    dx_ptr,
    stride_dloss,
    M,
    N,
    ignore_index,
    smoothing,
    z_loss,
    cap,
    PROBS: tl.constexpr,
    SMOOTH: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A long row in blocks: once for its sum, and again for its gradient while the cache still holds much of it.

    Accesses are 16 bytes wide whatever N is: up to VECTOR - 1 elements before the row's first aligned address, and as
    many behind its last, are taken by themselves.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: M * N may pass 2**31
    begin = (row * N + VECTOR - 1) // VECTOR * VECTOR  # the first aligned element, from which offsets count
    lead = (begin - row * N).to(tl.int32)
    inner = ((row * N + N) // VECTOR * VECTOR - begin).to(tl.int32)
    counts = row >= 0
    peak = 0.0
    y = lead
    if not PROBS:
        y = tl.load(target_ptr + row)
        counts = y != ignore_index
        is_class = counts & (y >= 0) & (y < N)
        peak = _peak(weight_ptr, y, is_class, counts, smoothing)
        if loss_ptr is not None:  # before threads wait for each other: the gradient may lie where the logits lie
            zy = _logits(x_ptr + row * N + y, is_class, cap, "")[0]
        y = tl.where(is_class, y - lead, N).to(tl.int32)
    x_ptr += begin
    target_ptr += begin
    if weight_ptr is not None:
        weight_ptr += lead
    # A thread's 16 bytes are a row of the block: maxima and sums along it need no other thread.
    offs = tl.arange(0, BLOCK_N // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    side = tl.arange(0, 2 * VECTOR)
    outer = tl.where(side < VECTOR, side - lead, side - VECTOR + inner)
    is_outer = tl.where(side < VECTOR, outer < 0, outer < N - lead)
    end = tl.where(counts, inner, 0)  # of what is read
    reads_outer = is_outer & counts
    share = smoothing / N

    if loss_ptr is not None:
        m = tl.full([BLOCK_N // VECTOR], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_N // VECTOR], tl.float32)
        mass = tl.zeros([BLOCK_N // VECTOR], tl.float32)  # sum of r, the spread part of q
        toward = tl.zeros([BLOCK_N // VECTOR], tl.float32)  # sum of r z
        KEEP: tl.constexpr = "evict_first" if dx_ptr is None else "evict_last"
        for start in range(0, end, BLOCK_N):
            at = start + offs
            mask = at < end
            z = _logits(x_ptr + at, mask, cap, KEEP)[0]
            grown = tl.maximum(m, tl.max(z, axis=1))
            shift = tl.where(grown == -float("inf"), 0.0, grown)  # only -inf so far: no NaN from -inf + inf
            total = total * exp(m - shift) + tl.sum(exp(z - shift[:, None]), axis=1)
            m = grown
            if PROBS or SMOOTH:
                r = _spread(target_ptr, weight_ptr, at, at, mask, smoothing, share, PROBS)
                mass += tl.sum(r, axis=1)
                toward += tl.sum(tl.where(mask, r * z, 0.0), axis=1)
        largest = tl.max(m, axis=0)
        if not IS_ALIGNED:
            z_outer = _logits(x_ptr + outer, reads_outer, cap, "")[0]
            largest = tl.maximum(largest, tl.max(z_outer, axis=0))
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        sums = tl.sum(total * exp(m - shift), axis=0)
        if not IS_ALIGNED:
            sums += tl.sum(exp(z_outer - shift), axis=0)
        lse = largest + tl.log(sums)
        A = 2.0 * z_loss * lse
        loss = z_loss * lse * lse
        if not PROBS:
            A += peak
            loss += peak * ((largest - zy) + tl.log(sums))
        if PROBS or SMOOTH:
            spread = tl.sum(mass, axis=0)
            against = tl.sum(toward, axis=0)
            if not IS_ALIGNED:
                r = _spread(target_ptr, weight_ptr, outer, outer, reads_outer, smoothing, share, PROBS)
                spread += tl.sum(r, axis=0)
                against += tl.sum(tl.where(reads_outer, r * z_outer, 0.0), axis=0)
            A += spread
            loss += spread * lse - against
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0).to(loss_ptr.dtype.element_ty))
        if stats_ptr is not None:
            tl.store(stats_ptr + row, tl.where(counts, lse, 0.0))
            tl.store(stats_ptr + M + row, tl.where(counts, A, 0.0))
        A /= sums
    else:
        largest = tl.load(stats_ptr + row)
        A = tl.load(stats_ptr + M + row)

    if dx_ptr is not None:
        dx_ptr += begin
        scale = 1.0
        if dloss_ptr is not None:
            scale = tl.load(dloss_ptr + row * stride_dloss).to(tl.float32)
        if divisor_ptr is not None:
            scale /= tl.load(divisor_ptr)
        scale = tl.where(counts, scale, 0.0)
        A = tl.where(counts, A * scale, 0.0)
        peak = tl.where(counts, peak * scale, 0.0)
        largest = tl.where(counts, largest, 0.0)
        for back in range(0, inner, BLOCK_N):  # last element first: the cache holds the end of the row
            at = (tl.cdiv(inner, BLOCK_N) - 1) * BLOCK_N - back + offs
            z, slope = _logits(x_ptr + at, at < end, cap, "evict_first")
            dx = _block_gradient(
                z, target_ptr, weight_ptr, at, at < end, y, largest, A, scale, peak, smoothing, share, PROBS, SMOOTH
            )
            tl.store(dx_ptr + at, (dx * slope).to(dx_ptr.dtype.element_ty), mask=at < inner)
        if not IS_ALIGNED:
            z, slope = _logits(x_ptr + outer, reads_outer, cap, "")
            dx = _block_gradient(
                z,
                target_ptr,
                weight_ptr,
                outer,
                reads_outer,
                y,
                largest,
                A,
                scale,
                peak,
                smoothing,
                share,
                PROBS,
                SMOOTH,
            )
            tl.store(dx_ptr + outer, (dx * slope).to(dx_ptr.dtype.element_ty), mask=is_outer)


@triton.jit
def _count_targets(target_ptr, weight_ptr, divisor_ptr, M, N, piece, ignore_index, BLOCK_M: tl.constexpr):
    """The targets of each piece that count, or their weights."""
    start = tl.program_id(0).to(tl.int64) * piece
    length = tl.minimum(piece, M - start).to(tl.int32)  # offsets within a piece take half the registers
    target_ptr += start
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(0, length, BLOCK_M):
        offs_m = at + tl.arange(0, BLOCK_M)
        y = tl.load(target_ptr + offs_m, mask=offs_m < length, other=ignore_index)
        counts = y != ignore_index
        if weight_ptr is not None:
            total += tl.load(weight_ptr + y, mask=counts & (y >= 0) & (y < N), other=0.0).to(tl.float32)
        else:
            total += counts.to(tl.float32)
    tl.store(divisor_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _sum_losses(loss_ptr, divisor_ptr, out_ptr, M, piece, BLOCK_M: tl.constexpr):
    """The losses of each piece, over the divisor where there is one."""
    start = tl.program_id(0).to(tl.int64) * piece
    end = tl.minimum(start + piece, M)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(start, end, BLOCK_M):
        offs_m = at + tl.arange(0, BLOCK_M)
        total += tl.load(loss_ptr + offs_m, mask=offs_m < end, other=0.0)
    loss = tl.sum(total, axis=0)
    if divisor_ptr is not None:
        loss /= tl.load(divisor_ptr)
    tl.store(out_ptr + tl.program_id(0), loss.to(out_ptr.dtype.element_ty))


@triton.jit
def _scale(x_ptr, by_ptr, N, BLOCK_N: tl.constexpr):
    """x times a number on the device, which mostly is 1: then nothing is touched."""
    by = tl.load(by_ptr).to(tl.float32)
    if by != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            offs_n = tl.cast(block, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + offs_n, mask=offs_n < N).to(tl.float32)
            tl.store(x_ptr + offs_n, (x * by).to(x_ptr.dtype.element_ty), mask=offs_n < N)


LONGEST_ROW = 32768  # elements of a row that one program can hold in registers
TILE = 4096  # elements of short rows that share a program; rows that are not aligned may be as long as this
PIECE = 8192  # targets or losses that one program sums at a time
MOST_PIECES = 128
SCALING = {"BLOCK_N": 4096, "num_warps": 8}
SCALING_PROGRAMS = 528  # 4 for each of an H200's 132 multiprocessors: few, since mostly they have nothing to do


def _default(mode: str, itemsize: int, bucket: int, is_aligned: bool) -> dict[str, Any]:
    if bucket <= (LONGEST_ROW if is_aligned else TILE):
        rows = max(1, TILE // bucket)
        return {"BLOCK_M": rows, "BLOCK_N": bucket, "num_warps": min(32, max(4, rows * bucket // 1024))}
    if mode == "both":  # few rows at a time, so that the cache holds them until they are read again
        return {"BLOCK_M": 1, "BLOCK_N": 16384 if bucket <= 65536 else 32768, "num_warps": 32}
    return {"BLOCK_M": 1, "BLOCK_N": 8192, "num_warps": 8}


def _choices(mode: str, itemsize: int, bucket: int, is_aligned: bool) -> list[dict[str, Any]]:
    if bucket <= TILE:
        tiles = {max(1, tile // bucket) for tile in (1024, 2048, 4096, 8192)}
        return [
            {"BLOCK_M": rows, "BLOCK_N": bucket, "num_warps": warps} for rows in sorted(tiles) for warps in (1, 4, 8)
        ]
    whole = [{"BLOCK_M": 1, "BLOCK_N": bucket, "num_warps": w} for w in (8, 16, 32)]
    loops = [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)]
    blocks = [{"BLOCK_M": 1, "BLOCK_N": n, "num_warps": w} for n, w in loops if n < bucket]
    return (whole if is_aligned and bucket <= LONGEST_ROW else []) + blocks


CONFIG = ConfigTable("cross_entropy.json", _default, _choices)

_launch_tile = Launcher(_cross_entropy_tile)
_launch_loop = Launcher(_cross_entropy_loop)
_launch_count = Launcher(_count_targets)
_launch_sum = Launcher(_sum_losses)
_launch_scale = Launcher(_scale)


def _programs(
    mode: str, dtype: torch.dtype, device: int, M: int, N: int, probs: bool, stride: int, options: Options
) -> PreparedLaunch:
    vector = 16 // dtype.itemsize
    is_aligned = N % vector == 0
    config = CONFIG(device, mode, dtype.itemsize, next_power_of_2(N), is_aligned)
    given, flags = (stride, M, N, *options), {"PROBS": probs, "SMOOTH": options.label_smoothing > 0}
    if config["BLOCK_N"] >= N:
        grid = (cdiv(M, config["BLOCK_M"]),)
        return _launch_tile.prepare(grid, *given, **flags, VECTOR=vector if is_aligned else 1, **config)
    blocks = {"BLOCK_N": config["BLOCK_N"], "num_warps": config["num_warps"]}
    return _launch_loop.prepare((M,), *given, **flags, VECTOR=vector, IS_ALIGNED=is_aligned, **blocks)


CUDA = CudaSource("loss/cross_entropy.cu", f"cross_entropy_both<T, {VECTORS_PER_THREAD[1]}>")
SHORTEST_CLUSTER = 4096  # elements of a row; shorter ones are as fast in a program's registers
CLUSTER = ConfigTable(
    "cross_entropy.json",
    lambda kernel, size, packs: cluster_default(1, packs),
    lambda kernel, size, packs: cluster_choices(1, packs),
)


@cached_plan
def _plan(
    form: str,
    mode: str,
    dtypes: tuple[Any, ...],
    is_aligned: bool,
    device: int,
    M: int,
    N: int,
    has_divisor: bool,
    has_stats: bool,
    stride: int,
    options: Options,
) -> Callable[..., None]:
    """How rows are taken, of logits, target, weight, divisor, dloss, losses, stats and dlogits; dtypes are those of
    the first three, of dloss and of losses. Clusters make losses with gradients, of index targets, without what is
    rarely asked for."""
    logits, target, weight, *others = dtypes
    is_plain = mode == "both" and not target.is_floating_point and weight is None and options.softcap is None
    is_plain = is_plain and not options.label_smoothing and {*others} <= {None, torch.float32}
    found = Rows(M, N, logits, device, is_plain and is_aligned)
    if form == "triton" or N < SHORTEST_CLUSTER or not found.fit_cluster(tensors=1):
        return _programs(mode, logits, device, M, N, target.is_floating_point, stride, options)
    numbers = stride, M, N, options.ignore_index, float(options.z_loss)
    launch = cluster_launch(CLUSTER, CUDA, "cross_entropy_both", found, 1, (), *numbers)
    return lambda logits, target, weight, *others: launch(logits, target, *others)


def rows(
    form: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    options: Options,
    *,
    losses: Tensor | None = None,
    stats: Tensor | None = None,
    dloss: Tensor | None = None,
    dlogits: Tensor | None = None,
) -> None:
    """Of logits [M, N]: the losses [M] with lse and A as stats [2, M], the gradient `dlogits`, or both.

    The gradient is that of the losses over the divisor, times `dloss` where it is given: one number or one for each
    row. Without `losses` it is made from stats. It may lie where the logits lie.
    """
    M, N = logits.shape
    if not M:
        return
    mode = "bwd" if losses is None else "fwd" if dlogits is None else "both"
    stride = 1 if dloss is not None and dloss.dim() and dloss.numel() > 1 else 0
    is_aligned = dlogits is not None and (logits.data_ptr() | dlogits.data_ptr()) % VECTOR == 0
    dtypes = (
        logits.dtype,
        target.dtype,
        None if weight is None else weight.dtype,
        None if dloss is None else dloss.dtype,
        None if losses is None else losses.dtype,
    )
    given = divisor is not None, stats is not None
    plan = _plan(form, mode, dtypes, is_aligned, logits.get_device(), M, N, *given, stride, options)
    plan(logits, target, weight, divisor, dloss, losses, stats, dlogits)


def count(target: Tensor, weight: Tensor | None, M: int, N: int, options: Options) -> Tensor:
    """What the mean divides by: a number on the device, known there before gradients are written."""
    if target.is_floating_point():
        return torch.full((), M, dtype=torch.float32, device=target.device)
    dtypes = target.dtype, None if weight is None else weight.dtype
    return _plan_count(dtypes, target.get_device(), M, N, options.ignore_index)(target, weight)


@cached_plan
def _plan_count(
    dtypes: tuple[Any, ...], device: int, M: int, N: int, ignore_index: int
) -> Callable[[Tensor, Tensor | None], Tensor]:
    pieces = _pieces(M)
    launch = _launch_count.prepare((pieces,), M, N, cdiv(M, pieces), ignore_index, BLOCK_M=PIECE, num_warps=32)

    def counted(target: Tensor, weight: Tensor | None) -> Tensor:
        parts = target.new_empty(() if pieces == 1 else pieces, dtype=torch.float32)
        launch(target, weight, parts)
        return parts if pieces == 1 else total(parts, None, torch.float32)

    return counted


def total(losses: Tensor, divisor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of the losses [M], in fp32, over the divisor where there is one."""
    return _plan_total(losses.get_device(), losses.numel(), divisor is not None, dtype)(losses, divisor)


@cached_plan
def _plan_total(
    device: int, M: int, has_divisor: bool, dtype: torch.dtype
) -> Callable[[Tensor, Tensor | None], Tensor]:
    pieces, how = _pieces(M), {"BLOCK_M": PIECE, "num_warps": 32}
    cut = _launch_sum.prepare((pieces,), M, cdiv(M, pieces), **how) if pieces > 1 else None
    rest = M if cut is None else pieces
    add_up = _launch_sum.prepare((1,), rest, rest, **how)

    def summed(losses: Tensor, divisor: Tensor | None) -> Tensor:
        if cut is not None:
            parts = losses.new_empty(pieces)
            cut(losses, None, parts)
            losses = parts
        out = losses.new_empty((), dtype=dtype)
        add_up(losses, divisor, out)
        return out

    return summed


def _pieces(M: int) -> int:
    """Shapes alone decide, so that the order of summation is always the same."""
    return min(MOST_PIECES, max(1, cdiv(M, PIECE)))


def scale(x: Tensor, by: Tensor) -> None:
    """x, which lies in one run, times a number on the device, in place."""
    if N := x.numel():
        _plan_scale(x.dtype, by.dtype, x.get_device(), N)(x, by)


@cached_plan
def _plan_scale(dtype: torch.dtype, of_number: torch.dtype, device: int, N: int) -> PreparedLaunch:
    return _launch_scale.prepare((min(SCALING_PROGRAMS, cdiv(N, SCALING["BLOCK_N"])),), N, **SCALING)
