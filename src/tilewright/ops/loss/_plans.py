"""Launches of the cross entropies: which kernel takes a call, in which configuration, on which grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.loss._options import CrossEntropy
from tilewright.ops.loss._triton import _count_targets, _cross_entropy_loop, _cross_entropy_tile, _scale, _sum_losses
from tilewright.runtime.clusters import VECTOR, Held, Rows, cluster_choices, cluster_default, row_launch
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.sizes import cdiv

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
