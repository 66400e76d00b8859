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

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.norm._cuda import by_clusters, wins
from tilewright.ops.norm._triton import backward_by_programs, forward_by_programs
from tilewright.runtime.clusters import PACK
from tilewright.runtime.configs import planned
from tilewright.runtime.eligibility import empty_like, has_at_least, has_elements, is_quiet, is_ready, runs_here
from tilewright.runtime.operator import contiguous_like, is_differentiated, is_seen, operator, spread
from tilewright.runtime.partial_sums import add_up
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


def _settled(*tensors: Tensor | None) -> tuple[list[Any], tuple[torch.dtype | None, ...], bool]:
    """The tensors, each a run of memory, their dtypes, and whether they all begin on 16 bytes."""
    runs: list[Tensor | None] = []
    dtypes: list[torch.dtype | None] = []
    together = 0
    for tensor in tensors:
        if tensor is None:
            dtypes.append(None)
        else:
            tensor = tensor.contiguous()
            dtypes.append(tensor.dtype)
            together |= tensor.data_ptr()
        runs.append(tensor)
    return runs, tuple(dtypes), together % PACK == 0


def _stats_for(x: Tensor, N: int, keeps: bool) -> Tensor:
    """Where forward leaves the mean, 0 for rms_norm, and 1 / sqrt(...) of each row; empty where they are not kept."""
    return x.new_empty(x.numel() // N if keeps and N else 0, 2, dtype=torch.float32)


def _clusters(
    op: str, direction: str, dtypes: Any, is_aligned: bool, device: int, form: str, M: int, N: int, *numbers: float
) -> Any:
    """How clusters take rows, if they can and should; dtypes are of x, weight and bias."""
    dtype, *weights = dtypes
    kinds = {*weights} - {None} or {dtype}
    if form == "triton" or not is_aligned or len(kinds) > 1 or (form == "best" and not wins(op, direction, device, N)):
        return None
    return by_clusters(op, direction, dtype, *kinds, device, M, N, *numbers)


@planned
def _plan_forward(
    dtypes: tuple[Any, ...],
    is_aligned: bool,
    device: int,
    M: int,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
    keeps: bool,
) -> Callable[..., None]:
    """How rows are normed; dtypes are of x, residual, weight and bias."""
    x, residual, *weights = dtypes
    op = _op(residual is not None, is_rms)
    found = _clusters(op, "forward", (x, *weights), is_aligned, device, form, M, N, eps, offset)
    return found or forward_by_programs(op, x, device, M, N, eps, float(offset))


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor | None,
    N: int,
    eps: float,
    offset: float,
    is_rms: bool,
    form: str,
) -> tuple[Tensor, Any]:
    """The normed rows and, with a residual, the sum."""
    y, total = contiguous_like(x), None if residual is None else contiguous_like(x)
    if M := N and x.numel() // N:
        tensors, dtypes, is_aligned = _settled(x, residual, weight, bias)
        keeps = stats is not None
        plan = _plan_forward(dtypes, is_aligned, x.get_device(), M, N, eps, offset, is_rms, form, keeps)
        plan(*tensors, y, total, stats)
    return y, total


@planned
def _plan_backward(
    dtypes: tuple[Any, ...],
    of_bias: torch.dtype | None,
    is_aligned: bool,
    device: int,
    M: int,
    N: int,
    offset: float,
    is_rms: bool,
    form: str,
    wanted: tuple[bool, bool],
) -> Callable[..., None]:
    """How gradients are made; dtypes are of x, weight, stats, dy and dsum."""
    x, weight, *_, dsum = dtypes
    op = _op(dsum is not None, is_rms)
    launch = _clusters(op, "backward", (x, weight, of_bias), is_aligned, device, form, M, N, offset)
    if launch:
        (shares,) = launch.grid
    else:
        launch, shares = backward_by_programs(op, x, device, M, N, float(offset))
    sums = add_up(shares, N, sum(wanted), device)

    def run(x: Tensor, weight: Any, stats: Tensor, dy: Tensor, dsum: Any, dx: Tensor, *gradients: Tensor):
        dw, db = (x.new_empty(shares, N, dtype=torch.float32) if is_wanted else None for is_wanted in wanted)
        launch(x, weight, stats, dy, dsum, dx, dw, db)
        if dw is not None:
            sums(dw, gradients[0], db, None if db is None else gradients[1])
        elif db is not None:
            sums(db, *gradients, None, None)

    return run


def _gradients_like(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    wanted = (True, *rest[-1])
    return [contiguous_like(t) for t in itertools.compress((x, weight, bias), wanted)]  # type: ignore[arg-type]


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
    M = N and x.numel() // N
    if not M:
        return [g.zero_() for g in gradients]
    tensors, dtypes, is_aligned = _settled(x, weight, stats, dy, dsum)
    of_bias = None if bias is None else bias.dtype
    plan = _plan_backward(dtypes, of_bias, is_aligned, x.get_device(), M, N, offset, is_rms, form, tuple(wanted))
    plan(*tensors, *gradients)
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
    wide, dy = x.float().reshape(-1, N), dy.float().reshape(-1, N)
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
    likes = itertools.compress((x, weight, bias), (True, *wanted))
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
    return dx, *spread(rest, wanted)


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
    stats = _stats_for(x, N, keeps)
    return _forward(x, None, weight, bias, stats if keeps else None, N, eps, offset, is_rms, form)[0], stats


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
    stats = _stats_for(x, N, keeps)
    return *_forward(x, residual, weight, bias, stats if keeps else None, N, eps, offset, is_rms, form), stats


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


def normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, eps: float, offset: float, is_rms: bool, form: str
) -> Tensor:
    """`normalize`, which keeps for backward what is needed."""
    keeps = is_differentiated(x, weight, bias)
    if keeps or is_seen():
        return normalize(x, weight, bias, N, eps, offset, is_rms, form, keeps)[0]
    return _forward(x, None, weight, bias, None, N, eps, offset, is_rms, form)[0]


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
    keeps = is_differentiated(x, residual, weight, bias)
    if keeps or is_seen():
        return add_normalize(x, residual, weight, bias, N, eps, offset, is_rms, form, keeps)[:2]
    return _forward(x, residual, weight, bias, None, N, eps, offset, is_rms, form)


def without_infinities(draw: Draw, x: Tensor) -> Tensor:
    """For rms_norm: of a row with an infinity torch itself makes zeros and one NaN on a CPU, and on a GPU, by its
    number of columns and its dtype, that or a row of NaN."""
    return x.masked_fill(x.isinf(), math.nan) if draw.values == "special" else x


def takes(smallest: int, shape: Any, inputs: Sequence[Any], weights: Sequence[Any]) -> bool:
    """Whether our kernels can take these as torch would: weights of the inputs' dtype or in fp32, shapes that fit."""
    for given in inputs:
        if not isinstance(given, Tensor):
            return False
    first = inputs[0]
    if not isinstance(shape, (tuple, list)) or not shape or first.numel() < smallest:
        return False
    size = torch.Size(shape)
    given = [w for w in weights if w is not None]
    for weight in given:
        if not isinstance(weight, Tensor) or weight.shape != size:
            return False
    if first.shape[-len(size) :] != size:
        return False
    if not given or given[0].dtype == first.dtype:
        return runs_here(*inputs, *given)
    is_wide = given[0].dtype == torch.float32 and given[0].device == first.device
    return is_wide and runs_here(*inputs) and runs_here(*given)


Facts = tuple[torch.Size, torch.dtype, int]  # shape, dtype, GPU


@planned
def _way(
    x: Facts, size: torch.Size, weight: Facts | None, bias: Facts | None, eps: float, offset: float, is_rms: bool
) -> Callable[..., Tensor] | None:
    """From x, weight and bias as they lie in memory to the normed rows; None if that is torch's to do."""
    shape, dtype, device = x
    given = [w for w in (weight, bias) if w]
    kinds = {w[1] for w in given} or {dtype}
    alike = all(w[0] == size and w[2] == device for w in given) and len(kinds) == 1 and kinds <= {dtype, torch.float32}
    if not size or not alike or not has_elements(shape, dtype, -len(size)) or shape[-len(size) :] != size:
        return None
    N = math.prod(size)
    dtypes = dtype, None, *(w and w[1] for w in (weight, bias))
    launch = _plan_forward(dtypes, True, device, math.prod(shape) // N, N, eps, offset, is_rms, "best", False)

    make = empty_like(shape)

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = make(x)
        launch(x, None, weight, bias, y, None, None)
        return y

    return run


def _facts(tensor: Tensor | None) -> Facts | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.get_device())


def by_ours(
    smallest: int, x: Any, shape: Any, weight: Any, bias: Any, eps: float, offset: float, is_rms: bool
) -> Tensor | None:
    """The norm by our kernels; None if they cannot take it as torch would."""
    if not has_at_least(smallest, x) or not isinstance(shape, (tuple, list)):
        return None
    if is_quiet() and is_ready(x) and (weight is None or is_ready(weight)) and (bias is None or is_ready(bias)):
        way = _way(_facts(x), torch.Size(shape), _facts(weight), _facts(bias), eps, offset, is_rms)
        return way and way(x, weight, bias)
    if takes(smallest, shape, (x,), (weight, bias)):
        return normed(x, weight, bias, math.prod(shape), eps, offset, is_rms, "best")
    return None


def require_alike(input: Any, residual: Any) -> None:
    """Raise unless the two can be added as they are."""
    for name, given in (("input", input), ("residual", residual)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(input, what), getattr(residual, what)
        if ours != theirs:
            raise ValueError(f"residual must have the {what} of input: {theirs} is not {ours}")
