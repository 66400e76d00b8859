"""What the norms share: each row of x, by itself or after a residual is added, brought to one size.

rms_norm: y = x r w, r = 1 / sqrt(mean x² + eps). layer_norm: y = (x - mean x) r w + b, r = 1 / sqrt(var x + eps).

Forward keeps rows in registers: one read, one write. Backward, with h = y before w and b, and g = dy w:
dx = r (g - h mean(g h)), for layer_norm less r mean(g) too; dw = sum of dy h and db = sum of dy over all rows.
Where gradients are wanted, forward leaves each row's mean and r, 8 bytes: to find them again backward would need sums
over the row before the sums of g h and g, and a cluster waits for each. Each of a fixed number of programs takes rows
at a fixed distance and keeps its share of dw and db in registers; a second kernel adds up the shares. Shapes and the
configuration decide the order of all sums, so results are the same every time.

A row too long for registers is taken in blocks, twice. Forward's sums for layer_norm are then taken, lane by lane,
around what the lane meets first, so that little cancels in the variance.

The form "triton" (`_norm_triton.py`) is that. The form "cuda" (`_norm_cuda.py`) has a cluster of blocks hold a row,
however long; "best" is whichever wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops._dispatch import runs_here
from tilewright.ops._norm_cuda import by_clusters, clusters_for
from tilewright.ops._norm_triton import add_up, backward_by_programs, forward_by_programs, shares_for
from tilewright.ops._operator import contiguous_like, operator
from tilewright.spec import Draw

EPS = torch.finfo(torch.float32).eps  # where rms_norm is given none: torch takes that of the type it computes in


def plain_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None, offset: float) -> Tensor:
    """By torch; in fp32 throughout where the weight is shifted or wider than x."""
    if isinstance(weight, Tensor) and (offset or _is_wider(weight, x)):
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.nn.functional.rms_norm(x.to(wide), shape, weight.to(wide) + offset, eps).to(x.dtype)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)


def plain_layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By torch; in fp32 throughout where weight and bias are wider than x, which not all of torch's kernels take."""
    given = [p for p in (weight, bias) if isinstance(p, Tensor)]
    if given and all(_is_wider(p, x) for p in given):
        return torch.nn.functional.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def _is_wider(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)


def _op(is_add: bool, is_rms: bool) -> str:
    return ("add_" if is_add else "") + ("rms_norm" if is_rms else "layer_norm")


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _stats_for(x: Tensor, N: int, keeps: bool) -> Tensor:
    """Where forward leaves the mean, 0 for rms_norm, and 1 / sqrt(...) of each row; empty where they are not kept."""
    return x.new_empty((x.numel() // max(1, N) if keeps else 0, 2), dtype=torch.float32)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
    keeps: bool,
) -> tuple[Tensor, Any, Tensor]:
    is_add = residual is not None
    y, total, stats = contiguous_like(x), contiguous_like(x) if is_add else None, _stats_for(x, N, keeps)
    M = x.numel() // max(1, N)
    if not M:
        return y, total, stats
    x, residual, weight, bias = _contiguous(x, residual, weight, bias)
    tensors = (x, residual, weight, bias, y, total, stats if keeps else None)
    op = _op(is_add, is_rms)
    if form != "triton":
        plan = clusters_for(op, x, (weight, bias), (residual,), "forward", N, form == "best")
        if plan:
            by_clusters(plan, tensors, M, N, eps, offset)
            return y, total, stats
    forward_by_programs(op, tensors, M, N, eps, offset)
    return y, total, stats


def _gradients_like(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    wanted = (True, *rest[-1])
    return [contiguous_like(t) for t, is_wanted in zip((x, weight, bias), wanted, strict=True) if is_wanted]  # type: ignore[arg-type]


@operator("normalize_backward", fake=_gradients_like)
def normalize_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    dy: Tensor,
    dsum: Tensor | None,
    N: int,
    offset: float,
    is_rms: bool,
    form: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradient of x and, as far as they are wanted, those of weight and bias, with the stats that forward left."""
    gradients = _gradients_like(x, weight, bias, wanted)
    M = x.numel() // max(1, N)
    if not M:
        return [g.zero_() for g in gradients]
    x, weight, stats, dy, dsum = _contiguous(x, weight, stats, dy, dsum)
    op = _op(dsum is not None, is_rms)
    tensors = (x, weight, stats, dy, dsum, gradients[0])
    plan = None
    if form != "triton":
        plan = clusters_for(op, x, (weight, bias), (stats, dy, dsum), "backward", N, form == "best")
    if plan:
        shares = shares_for(x, plan.clusters(M), N, wanted)
        by_clusters(plan, (*tensors, *shares), M, N, offset)
    else:
        shares = backward_by_programs(op, tensors, M, N, offset, wanted)
    add_up(shares, gradients[1:])
    return gradients


def _gradients_in_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    dsum: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The same written out, for torch to differentiate again."""
    wide, dy = x.float().view(-1, N), dy.float().reshape(-1, N)
    if not is_rms:
        wide = wide - wide.mean(1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    normed = wide * rstd
    g = dy if weight is None else dy * (weight.float().reshape(N) + offset)
    dx = g - normed * (g * normed).mean(1, keepdim=True)
    dx = rstd * (dx if is_rms else dx - g.mean(1, keepdim=True))
    gradients = [dx if dsum is None else dx + dsum.float().reshape(-1, N)]
    gradients += [(dy * normed).sum(0)] if wanted[0] else []
    gradients += [dy.sum(0)] if wanted[1] else []
    likes = [like for like, is_wanted in zip((x, weight, bias), (True, *wanted), strict=True) if is_wanted]
    return [g.view(like.shape).to(like.dtype) for g, like in zip(gradients, likes, strict=True)]  # type: ignore[union-attr]


def _gradients(ctx: Any, dy: Tensor, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of x, weight and bias."""
    x, weight, bias, stats = ctx.saved_tensors
    N, eps, offset, is_rms, form, keeps = ctx.rest
    wanted = ctx.needs_input_grad[-8:-6]
    if torch.is_grad_enabled() or not keeps:
        dx, *rest = _gradients_in_torch(x, weight, bias, dy, dsum, N, eps, offset, is_rms, wanted)
    else:
        dx, *rest = normalize_backward(x, weight, bias, stats, dy, dsum, N, offset, is_rms, form, wanted)
    return dx, *(rest.pop(0) if is_wanted else None for is_wanted in wanted)


def _results_like(x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), _stats_for(x, N, rest[-1])


@operator("normalize", fake=_results_like)
def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """rms_norm or layer_norm of runs of N elements, times offset + weight, by the named form; layer_norm plus bias.
    With them what backward needs of each row, if it keeps that."""
    y, _, stats = _forward(x, None, weight, bias, N, eps, offset, is_rms, form, keeps)
    return y, stats


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    found = (None, None, None) if dy is None else _gradients(ctx, dy, None)
    return *found, None, None, None, None, None, None


normalize.differentiate(_save, _backward)


def _sums_like(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return contiguous_like(x), contiguous_like(x), _stats_for(x, N, rest[-1])


@operator("add_normalize", fake=_sums_like)
def add_normalize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of x + residual, and that sum, before what backward needs."""
    return _forward(x, residual, weight, bias, N, eps, offset, is_rms, form, keeps)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, bias, *ctx.rest = inputs
    _, total, stats = output
    ctx.save_for_backward(total, weight, bias, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _backward_sum(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    dx, dw, db = (dsum, None, None) if dy is None else _gradients(ctx, dy, dsum)
    return dx, dx, dw, db, None, None, None, None, None, None


add_normalize.differentiate(_save_sum, _backward_sum)


def _is_differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, eps: float, offset: float, is_rms: bool, form: str
) -> Tensor:
    """`normalize`, which keeps for backward what is needed."""
    return normalize(x, weight, bias, N, eps, offset, is_rms, form, _is_differentiated(x, weight, bias))[0]


def add_normed(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
) -> tuple[Tensor, Tensor]:
    """`add_normalize`, likewise."""
    keeps = _is_differentiated(x, residual, weight, bias)
    y, total, _ = add_normalize(x, residual, weight, bias, N, eps, offset, is_rms, form, keeps)
    return y, total


def without_infinities(draw: Draw, x: Tensor) -> Tensor:
    """For rms_norm: of a row with an infinity torch itself makes zeros and one NaN on a CPU, and on a GPU, by its
    number of columns and its dtype, that or a row of NaN."""
    return x.masked_fill(x.isinf(), math.nan) if draw.values == "special" else x


def takes(smallest: int, shape: Any, inputs: Sequence[Any], weights: Sequence[Any]) -> bool:
    """Whether our kernels can take these as torch would: weights of the inputs' dtype or in fp32, shapes that fit."""
    if not all(isinstance(t, Tensor) for t in inputs) or not isinstance(shape, tuple | list) or not shape:
        return False
    first, given = inputs[0], [w for w in weights if w is not None]
    return (
        first.numel() >= smallest
        and all(isinstance(w, Tensor) and w.shape == torch.Size(shape) for w in given)
        and first.shape[-len(shape) :] == torch.Size(shape)
        and runs_here(*inputs)
        and (not given or (runs_here(*given) and given[0].device == first.device))
        and all(w.dtype in (first.dtype, torch.float32) for w in given)
    )


def require_alike(input: Any, residual: Any) -> None:
    """Raise unless the two can be added as they are."""
    for name, given in (("input", input), ("residual", residual)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(input, what), getattr(residual, what)
        if ours != theirs:
            raise ValueError(f"residual must have the {what} of input: {theirs} is not {ours}")
