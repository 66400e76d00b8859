"""The cross entropies' common parts: options, formula, eligibility, and the kernels over rows of logits.

For a row z with target t (one-hot or probabilities), label smoothing s and class weights w, where
q_c = w_c ((1 - s) t_c + s / N):

    loss = sum of q_c (lse - z_c) + z_loss lse²,    lse = log sum exp z
    dloss/dz_c = A exp(z_c - lse) - q_c,            A = dloss/dlse = sum of q + 2 z_loss lse

The kernels compute losses, or losses with the gradients for an incoming gradient of 1, or gradients from lse and A.
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
    Held,
    Rows,
    cluster_choices,
    cluster_default,
    row_launch,
)
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.crossovers import Crossover, PerGPU
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import MAX_INT32, Launcher, PreparedLaunch
from tilewright.runtime.operator import fast_apply
from tilewright.runtime.sizes import cdiv

IGNORE_INDEX = -100  # torch's default
REDUCTIONS = ("none", "mean", "sum")


class CrossEntropy(NamedTuple):
    """The options of a call."""

    ignore_index: int = IGNORE_INDEX
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    form: str = "best"  # triton, or the faster one of Triton and CUDA C++
    is_wide: bool = False  # the loss is fp32, whatever the dtype of the logits

    @property
    def is_scalar(self) -> bool:
        """Return whether the loss is one number rather than one per row."""
        return self.reduction != "none"

    def validate(self) -> None:
        """Raise for the options that torch does not have and therefore does not check."""
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, not {self.softcap}")
        if not isinstance(self.z_loss, (int, float)):
            raise TypeError(f"z_loss must be a number, not {type(self.z_loss).__name__}")

    def with_floats(self) -> CrossEntropy:
        """Return the same with floats where ints were given, for which Triton would compile other kernels."""
        softcap = None if self.softcap is None else float(self.softcap)
        return self._replace(label_smoothing=float(self.label_smoothing), z_loss=float(self.z_loss), softcap=softcap)

    def loss_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the loss of logits of a dtype."""
        return torch.float32 if self.is_wide else dtype


def torch_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy) -> Tensor:
    """Cross entropy of soft-capped logits by torch, plus the z-loss."""
    cap, reduction = options.softcap, options.reduction
    logits = logits.float() if options.is_wide else logits
    z = logits if cap is None else cap * torch.tanh(logits / cap)
    given = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    loss = torch.nn.functional.cross_entropy(z, target, weight, reduction=reduction, **given)
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
    weights = torch.ones_like(squares) if weight is None else weight[target.masked_fill(ignored, 0)]
    return loss + squares.sum() / weights.masked_fill(ignored, 0).sum()


def eligible_loss(
    crossover: Crossover,
    shape: torch.Size,
    floats: Sequence[Tensor],
    target: Any,
    weight: Any,
    options: CrossEntropy,
) -> bool:
    """Return whether our kernels can take logits of this shape, computed from `floats`, as torch would.

    The logits are rows of classes, with a class index or probabilities for each row.
    """
    if not isinstance(target, Tensor) or len(shape) not in (1, 2):
        return False
    device, size = floats[0].get_device(), shape.numel()
    if not crossover.reached(size, device):
        return False
    if not size or shape[-1] > MAX_INT32:
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
    fits = fits and options.reduction in REDUCTIONS and isinstance(options.ignore_index, int)
    return fits and 0 <= options.label_smoothing <= 1 and eligible(*floats)


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


MAX_ROW = 32768  # elements of a row that one program can hold in registers
TILE = 4096  # elements of short rows that share a program, and of the longest unaligned row that one program holds
BLOCK_M = 8192  # targets or losses that one program sums per step
MAX_PARTS = 128  # partial sums of targets or losses
SCALE_CONFIG = {"BLOCK_N": 4096, "num_warps": 8}
SCALE_PROGRAMS_PER_SM = 4  # few, since mostly they have nothing to do


def _default(mode: str, itemsize: int, bucket: int, is_aligned: bool) -> Config:
    if bucket <= (MAX_ROW if is_aligned else TILE):
        rows = max(1, TILE // bucket)
        return {"BLOCK_M": rows, "BLOCK_N": bucket, "num_warps": min(32, max(4, rows * bucket // 1024))}
    if mode == "both":  # few rows at a time, so that L2 holds them until they are read again
        return {"BLOCK_M": 1, "BLOCK_N": 16384 if bucket <= 65536 else 32768, "num_warps": 32}
    return {"BLOCK_M": 1, "BLOCK_N": 8192, "num_warps": 8}


def _choices(mode: str, itemsize: int, bucket: int, is_aligned: bool) -> list[Config]:
    if bucket <= TILE:
        tiles = {max(1, tile // bucket) for tile in (1024, 2048, 4096, 8192)}
        return [
            {"BLOCK_M": rows, "BLOCK_N": bucket, "num_warps": warps} for rows in sorted(tiles) for warps in (1, 4, 8)
        ]
    whole = [{"BLOCK_M": 1, "BLOCK_N": bucket, "num_warps": w} for w in (8, 16, 32)]
    loops = [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)]
    blocks = [{"BLOCK_M": 1, "BLOCK_N": n, "num_warps": w} for n, w in loops if n < bucket]
    return (whole if is_aligned and bucket <= MAX_ROW else []) + blocks


CONFIG = ConfigTable("cross_entropy.json", _default, _choices)

_launch_tile = Launcher(_cross_entropy_tile)
_launch_loop = Launcher(_cross_entropy_loop)
_launch_count = Launcher(_count_targets)
_launch_sum = Launcher(_sum_losses)
_launch_scale = Launcher(_scale)


def _plan_triton(mode: str, rows: Rows, probs: bool, stride: int, options: CrossEntropy) -> PreparedLaunch:
    vector = VECTOR // rows.itemsize
    is_aligned = rows.N % vector == 0
    config = CONFIG(rows.device, mode, rows.itemsize, rows.block, is_aligned)
    numbers = options.ignore_index, options.label_smoothing, options.z_loss, options.softcap
    given, flags = (stride, rows.M, rows.N, *numbers), {"PROBS": probs, "SMOOTH": options.label_smoothing > 0}
    if config["BLOCK_N"] >= rows.N:
        grid = (cdiv(rows.M, config["BLOCK_M"]),)
        return _launch_tile.prepare(grid, *given, **flags, VECTOR=vector if is_aligned else 1, **config)
    blocks = {"BLOCK_N": config["BLOCK_N"], "num_warps": config["num_warps"]}
    return _launch_loop.prepare((rows.M,), *given, **flags, VECTOR=vector, IS_ALIGNED=is_aligned, **blocks)


HELD = Held(1, least=8)
CUDA = CudaSource("loss/cross_entropy.cu", f"cross_entropy_both<T, {HELD.vectors}>")
# Row length from which a cluster is faster.
MIN_CLUSTER = PerGPU("cross_entropy in clusters", lambda gpu: TILE)
CLUSTER = ConfigTable(
    "cross_entropy.json",
    lambda kernel, itemsize, vectors, *most: cluster_default(HELD, vectors, *most),
    lambda kernel, itemsize, vectors: cluster_choices(HELD, vectors),
)


@cached_plan
def _plan_rows(
    options: CrossEntropy,
    mode: str,
    dtypes: tuple[torch.dtype | None, ...],
    is_aligned: bool,
    device: int,
    M: int,
    N: int,
    stride: int,
    *given: bool,
) -> Callable[..., None]:
    """Return the launch that takes logits, target, weight, divisor, dloss, losses, stats and dlogits.

    `dtypes` are those of the first three, of dloss and of losses; `given` says whether there are a divisor and stats.
    Clusters compute losses with gradients, for class indices, without weights, smoothing and soft-cap.
    """
    logits, target, weight, *others = dtypes
    probs = target.is_floating_point  # type: ignore[union-attr]
    is_plain = mode == "both" and not probs and weight is None and options.softcap is None
    is_plain = is_plain and not options.label_smoothing and {*others} <= {None, torch.float32}
    rows = Rows(M, N, logits, device)  # type: ignore[arg-type]
    fits = is_plain and is_aligned and options.form != "triton" and rows.fit_cluster(HELD)
    if not fits or MIN_CLUSTER[device] > N:
        return _plan_triton(mode, rows, probs, stride, options)
    how = row_launch(CLUSTER, "cross_entropy_both", rows, HELD)
    numbers = stride, M, N, options.ignore_index, float(options.z_loss), *how.numbers
    name = f"cross_entropy_both<T, {how.each}>"
    launch = CUDA.prepare(name, rows.dtype, device, how.grid, how.threads, *numbers, cluster=how.blocks)
    return lambda logits, target, weight, *others: launch(logits, target, *others)


def launch_rows(
    options: CrossEntropy,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    *,
    losses: Tensor | None = None,
    stats: Tensor | None = None,
    dloss: Tensor | None = None,
    dlogits: Tensor | None = None,
) -> None:
    """Compute the losses [M] of logits [M, N], with lse and A as stats [2, M], the gradient `dlogits`, or both.

    The gradient is that of the losses over the divisor, times `dloss` if given: one number or one per row. Without
    `losses` it is computed from stats. It may overwrite the logits.
    """
    M, N = logits.shape
    if not M:
        return
    mode = "bwd" if losses is None else "fwd" if dlogits is None else "both"
    stride = 1 if dloss is not None and dloss.dim() and dloss.numel() > 1 else 0
    is_aligned = dlogits is not None and (logits.data_ptr() | dlogits.data_ptr()) % VECTOR == 0
    dtypes = tuple(None if t is None else t.dtype for t in (logits, target, weight, dloss, losses))
    given = divisor is not None, stats is not None
    plan = _plan_rows(options, mode, dtypes, is_aligned, logits.get_device(), M, N, stride, *given)
    plan(logits, target, weight, divisor, dloss, losses, stats, dlogits)


def mean_divisor(target: Tensor, weight: Tensor | None, M: int, N: int, options: CrossEntropy) -> Tensor | None:
    """Return what the mean divides by, in device memory; None for another reduction."""
    if options.reduction != "mean":
        return None
    if target.is_floating_point():
        return torch.full((), M, dtype=torch.float32, device=target.device)
    dtypes = target.dtype, None if weight is None else weight.dtype
    return _plan_count(dtypes, target.get_device(), M, N, options.ignore_index)(target, weight)


@cached_plan
def _plan_count(
    dtypes: tuple[Any, ...], device: int, M: int, N: int, ignore_index: int
) -> Callable[[Tensor, Tensor | None], Tensor]:
    parts = _parts(M)
    launch = _launch_count.prepare((parts,), M, N, cdiv(M, parts), ignore_index, BLOCK_M=BLOCK_M, num_warps=32)

    def count(target: Tensor, weight: Tensor | None) -> Tensor:
        partials = target.new_empty(() if parts == 1 else parts, dtype=torch.float32)
        launch(target, weight, partials)
        return partials if parts == 1 else sum_losses(partials, None, torch.float32)

    return count


def sum_losses(losses: Tensor, divisor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of the losses [M], added in fp32, over the divisor if there is one."""
    return _plan_sum(losses.get_device(), losses.numel(), divisor is not None, dtype)(losses, divisor)


@cached_plan
def _plan_sum(device: int, M: int, has_divisor: bool, dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Tensor]:
    parts, config = _parts(M), {"BLOCK_M": BLOCK_M, "num_warps": 32}
    first = _launch_sum.prepare((parts,), M, cdiv(M, parts), **config) if parts > 1 else None
    rest = M if first is None else parts
    last = _launch_sum.prepare((1,), rest, rest, **config)

    def run(losses: Tensor, divisor: Tensor | None) -> Tensor:
        if first is not None:
            partials = losses.new_empty(parts)
            first(losses, None, partials)
            losses = partials
        out = losses.new_empty((), dtype=dtype)
        last(losses, divisor, out)
        return out

    return run


def _parts(M: int) -> int:
    """Return the number of partial sums. Shapes alone decide, so the order of summation is fixed."""
    return min(MAX_PARTS, max(1, cdiv(M, BLOCK_M)))


def scale_in_place(x: Tensor, by: Tensor) -> None:
    """Multiply x, which is contiguous, by a number in device memory."""
    if N := x.numel():
        _plan_scale(x.dtype, by.dtype, x.get_device(), N)(x, by)


@cached_plan
def _plan_scale(dtype: torch.dtype, by_dtype: torch.dtype, device: int, N: int) -> PreparedLaunch:
    programs = min(SCALE_PROGRAMS_PER_SM * gpu_facts(device).sms, cdiv(N, SCALE_CONFIG["BLOCK_N"]))
    return _launch_scale.prepare((programs,), N, **SCALE_CONFIG)


def fused_apply(
    forward: Callable[..., tuple[Any, Sequence[Tensor | None]]],
    save: Callable[..., None],
    backward: Callable[..., Sequence[Any]],
    tensors: Sequence[int],
) -> Callable[..., Tensor]:
    """Return `apply` of an autograd node whose forward also computes the gradients, for an incoming gradient of 1.

    `forward(ctx, *args)` returns the outputs, of which the first is the loss, and the gradients of the first arguments.
    `save` and `backward` are those of the operator; `tensors` are the positions of the arguments that are tensors.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            output, ctx.gradients = forward(ctx, *args)
            save(ctx, args, output)
            return output[0]

        @staticmethod
        def backward(ctx: Any, dloss: Tensor | None) -> Any:  # type: ignore[override]
            # Autograd may hand the gradients out without a copy, so they serve one backward. A second one recomputes.
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None or torch.is_grad_enabled() or dloss is None:
                gradients = backward(ctx, dloss)
            else:
                for gradient in gradients:
                    if gradient is not None:
                        scale_in_place(gradient, dloss)
            return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    return fast_apply(Node, tensors)
