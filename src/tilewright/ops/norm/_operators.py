"""RMS norm and layer norm, alone or after adding a residual: plans, differentiable operators, call path.

rms_norm: y = x r w, r = 1 / sqrt(mean x² + eps). layer_norm: y = (x - mean x) r w + b, r = 1 / sqrt(var x + eps).

Forward keeps rows in registers: one read, one write. Backward, with h = y before w and b, and g = dy w:
dx = r (g - h mean(g h)), for layer_norm also minus r mean(g); dw = sum of dy h and db = sum of dy over all rows.
Where gradients are needed, forward stores mean and r of each row (8 bytes): recomputing them in backward would add row
reductions before those of g h and g, and a cluster would wait for each. A fixed number of programs strides over the
rows and keeps partial sums of dw and db in registers; a second kernel adds them. Shapes and the configuration fix the
order of all sums, so results are deterministic.

A row too long for registers is read in blocks, twice. The forward sums of layer_norm are then taken, lane by lane,
around the lane's first element, so that little cancels in the variance.

Form "triton" (`_triton.py`) is that. Form "cuda" (`_cuda.py`) has a thread block cluster hold a row of up to 262144
elements (65536 in backward) that may start anywhere; "best" is whichever is faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.norm._cuda import cluster_plan, clusters_win
from tilewright.ops.norm._triton import plan_triton_backward, plan_triton_forward
from tilewright.runtime.clusters import VECTOR
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.eligibility import Dispatch, TensorKey, eligible, empty_like_options, has_elements
from tilewright.runtime.operator import contiguous_like, is_observed, needs_gradient, operator, scatter
from tilewright.runtime.partial_sums import sum_partials

RMS_EPS = torch.finfo(torch.float32).eps  # torch's default: that of the dtype it computes in
Dtypes = tuple[torch.dtype | None, ...]


class Norm(NamedTuple):
    """The options of a call."""

    N: int  # elements per row
    eps: float
    is_rms: bool
    offset: float = 0.0  # added to the weight
    form: str = "best"
    keeps_stats: bool = False  # whether forward stores what backward needs of each row

    def op(self, adds: bool) -> str:
        return ("add_" if adds else "") + ("rms_norm" if self.is_rms else "layer_norm")


def torch_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None, offset: float) -> Tensor:
    """RMS norm by torch; in fp32 throughout where the weight has an offset or is wider than x."""
    if isinstance(weight, Tensor) and (offset or _is_wider(weight, x)):
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.nn.functional.rms_norm(x.to(wide), shape, weight.to(wide) + offset, eps).to(x.dtype)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)


def torch_layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm by torch; in fp32 throughout where weight and bias are wider than x, which some kernels refuse."""
    given = [p for p in (weight, bias) if isinstance(p, Tensor)]
    if given and all(_is_wider(p, x) for p in given):
        return torch.nn.functional.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def _is_wider(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)


def _contiguous(*tensors: Tensor | None) -> tuple[list[Any], Dtypes, bool]:
    """Return the tensors made contiguous, their dtypes, and whether all are aligned to 16 bytes."""
    made: list[Tensor | None] = []
    dtypes: list[torch.dtype | None] = []
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            dtypes.append(None)
        else:
            tensor = tensor.contiguous()
            dtypes.append(tensor.dtype)
            addresses |= tensor.data_ptr()
        made.append(tensor)
    return made, tuple(dtypes), addresses % VECTOR == 0


def _empty_stats(x: Tensor, options: Norm) -> Tensor:
    """Return the tensor for mean (0 for rms_norm) and 1 / sqrt(…) of each row; empty where they are not kept."""
    rows = x.numel() // options.N if options.keeps_stats and options.N else 0
    return x.new_empty(rows, 2, dtype=torch.float32)


def _plan_cluster(
    options: Norm, adds: bool, direction: str, dtypes: Dtypes, is_aligned: bool, device: int, M: int
) -> Any:
    """Return a cluster launch if clusters can take such rows and should; dtypes are of x, weight and bias."""
    dtype, *weights = dtypes
    weight_dtypes = {*weights} - {None} or {dtype}
    op, form = options.op(adds), options.form
    loses = form == "best" and not clusters_win(op, direction, dtype, device, M, options.N)  # type: ignore[arg-type]
    if form == "triton" or not is_aligned or len(weight_dtypes) > 1 or loses:
        return None
    numbers = (options.eps, options.offset) if direction == "forward" else (options.offset,)
    return cluster_plan(op, direction, dtype, *weight_dtypes, device, M, options.N, *numbers)  # type: ignore[arg-type]


def _row_stride(x: Tensor, N: int) -> int | None:
    """Return the distance between the rows of x: N elements without gaps. None if rows have gaps or no one distance."""
    row, stride, size = 1, None, 0
    for length, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if length == 1:
            continue
        if row < N:
            if step != row:
                return None
            row *= length
        elif stride is None:
            stride, size = step, length * step
        elif step != size:
            return None
        else:
            size *= length
    return stride


@cached_plan
def _plan_forward(
    options: Norm, dtypes: Dtypes, is_aligned: bool, device: int, M: int, stride: int | None = None
) -> Callable[..., None] | None:
    """Return the launch that takes x, residual, weight, bias, y, sum and stats; dtypes are those of the first four.

    `stride` is the distance between the rows of x if they do not follow each other; None if no kernel can take them.
    """
    x, residual, *weights = dtypes
    adds = residual is not None
    numbers = options.eps, float(options.offset)
    found = stride is None and _plan_cluster(options, adds, "forward", (x, *weights), is_aligned, device, M)
    return found or plan_triton_forward(options.op(adds), x, device, M, options.N, stride, *numbers)  # type: ignore[arg-type]


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, stats: Tensor | None, options: Norm
) -> tuple[Tensor, Any]:
    """Return the normalized rows and, with a residual, the sum."""
    y, total = contiguous_like(x), None if residual is None else contiguous_like(x)
    if M := options.N and x.numel() // options.N:
        tensors, dtypes, is_aligned = _contiguous(residual, weight, bias)
        launch = None
        if not x.is_contiguous() and (stride := _row_stride(x, options.N)) is not None:
            launch = _plan_forward(options, (x.dtype, *dtypes), False, x.get_device(), M, stride)
        if launch is None:
            (x,), _, is_x_aligned = _contiguous(x)
            launch = _plan_forward(options, (x.dtype, *dtypes), is_aligned and is_x_aligned, x.get_device(), M)
        launch(x, *tensors, y, total, stats)  # type: ignore[misc]
    return y, total


@cached_plan
def _plan_backward(
    options: Norm,
    dtypes: Dtypes,
    bias_dtype: torch.dtype | None,
    is_aligned: bool,
    device: int,
    M: int,
    wanted: tuple[bool, bool],
) -> Callable[..., None]:
    """Return the function that takes x, weight, stats, dy, dsum, dx and the wanted gradients of weight and bias.

    `dtypes` are those of the first five.
    """
    x, weight, *_, dsum = dtypes
    N, adds = options.N, dsum is not None
    launch = _plan_cluster(options, adds, "backward", (x, weight, bias_dtype), is_aligned, device, M)
    if launch:
        (splits,) = launch.grid
    else:
        launch, splits = plan_triton_backward(options.op(adds), x, device, M, N, float(options.offset))  # type: ignore[arg-type]
    add_partials = sum_partials(splits, N, sum(wanted), device)

    def run(x: Tensor, weight: Any, stats: Tensor, dy: Tensor, dsum: Any, dx: Tensor, *gradients: Tensor) -> None:
        dw, db = (x.new_empty(splits, N, dtype=torch.float32) if is_wanted else None for is_wanted in wanted)
        launch(x, weight, stats, dy, dsum, dx, dw, db)
        if dw is not None:
            add_partials(dw, gradients[0], db, None if db is None else gradients[1])
        elif db is not None:
            add_partials(db, *gradients, None, None)

    return run


class NormBackward(NamedTuple):
    """The options of the gradients."""

    N: int
    offset: float
    is_rms: bool
    form: str
    wants_weight: bool
    wants_bias: bool


def _empty_gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, dy: Tensor, dsum: Any, options: NormBackward
) -> list[Tensor]:
    wanted = (True, options.wants_weight, options.wants_bias)
    return [contiguous_like(t) for t in itertools.compress((x, weight, bias), wanted)]  # type: ignore[arg-type]


@operator("normalize_backward", fake=_empty_gradients)
def normalize_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    dy: Tensor,
    dsum: Tensor | None,
    options: NormBackward,
) -> list[Tensor]:
    """The gradient of x and the wanted ones of weight and bias, from the stats that forward kept."""
    gradients = _empty_gradients(x, weight, bias, stats, dy, dsum, options)
    M = options.N and x.numel() // options.N
    if not M:
        return [g.zero_() for g in gradients]
    tensors, dtypes, is_aligned = _contiguous(x, weight, stats, dy, dsum)
    bias_dtype = None if bias is None else bias.dtype
    norm = Norm(options.N, 0.0, options.is_rms, options.offset, options.form)
    wanted = options.wants_weight, options.wants_bias
    _plan_backward(norm, dtypes, bias_dtype, is_aligned, x.get_device(), M, wanted)(*tensors, *gradients)
    return gradients


def _gradients_in_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    dsum: Tensor | None,
    options: Norm,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the same gradients in torch operations, which torch can differentiate again."""
    N = options.N
    wide, dy = x.float().reshape(-1, N), dy.float().reshape(-1, N)
    if not options.is_rms:
        wide = wide - wide.mean(1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + options.eps)
    normed = wide * rstd
    g = dy if weight is None else dy * (weight.float().reshape(N) + options.offset)
    dx = g - normed * (g * normed).mean(1, keepdim=True)
    dx = rstd * (dx if options.is_rms else dx - g.mean(1, keepdim=True))
    gradients = [dx if dsum is None else dx + dsum.float().reshape(-1, N)]
    gradients += [(dy * normed).sum(0)] if wanted[0] else []
    gradients += [dy.sum(0)] if wanted[1] else []
    likes = itertools.compress((x, weight, bias), (True, *wanted))
    return [g.view(like.shape).to(like.dtype) for g, like in zip(gradients, likes, strict=True)]  # type: ignore[union-attr]


def _gradients(ctx: Any, dy: Tensor, dsum: Tensor | None, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias."""
    x, weight, bias, stats = ctx.saved_tensors
    options: Norm = ctx.options
    if torch.is_grad_enabled() or not options.keeps_stats:
        dx, *rest = _gradients_in_torch(x, weight, bias, dy, dsum, options, wanted)
    else:
        backward = NormBackward(options.N, options.offset, options.is_rms, options.form, *wanted)
        dx, *rest = normalize_backward(x, weight, bias, stats, dy, dsum, backward)
    return dx, *scatter(rest, wanted)


def _save(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, options: Norm) -> None:
    ctx.options = options
    ctx.save_for_backward(x, weight, bias, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _fake_normalize(x: Tensor, weight: Any, bias: Any, options: Norm) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), _empty_stats(x, options)


@operator("normalize", fake=_fake_normalize)
def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: Norm) -> tuple[Tensor, Tensor]:
    """The norm of rows of N elements, times offset + weight, plus bias; and the stats of each row, if they are kept."""
    stats = _empty_stats(x, options)
    return _forward(x, None, weight, bias, stats if options.keeps_stats else None, options)[0], stats


def _save_normalize(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, options = inputs
    _save(ctx, x, weight, bias, output[1], options)


def _backward_normalize(ctx: Any, dy: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    return () if dy is None else _gradients(ctx, dy, None, ctx.needs_input_grad[1:3])


normalize.differentiate(_save_normalize, _backward_normalize)


def _fake_add_normalize(x: Tensor, residual: Any, weight: Any, bias: Any, options: Norm) -> tuple[Tensor, ...]:
    return contiguous_like(x), contiguous_like(x), _empty_stats(x, options)


@operator("add_normalize", fake=_fake_add_normalize)
def add_normalize(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, options: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual, that sum, and the stats of each row, if they are kept."""
    stats = _empty_stats(x, options)
    return *_forward(x, residual, weight, bias, stats if options.keeps_stats else None, options), stats


def _save_add_normalize(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, bias, options = inputs
    _, total, stats = output
    _save(ctx, total, weight, bias, stats, options)


def _backward_add_normalize(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    dx, *rest = (dsum,) if dy is None else _gradients(ctx, dy, dsum, ctx.needs_input_grad[2:4])
    return dx, dx, *rest


add_normalize.differentiate(_save_add_normalize, _backward_add_normalize)


def apply_norm(options: Norm, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Any:
    """Return the norm of x, or that of x + residual and the sum; keeps stats if a gradient will be needed."""
    keeps = needs_gradient(x, residual, weight, bias)
    if not keeps and not is_observed():
        y, total = _forward(x, residual, weight, bias, None, options)
        return y if residual is None else (y, total)
    options = Norm(*options[:-1], keeps)
    if residual is None:
        return normalize(x, weight, bias, options)[0]
    return add_normalize(x, residual, weight, bias, options)[:2]


Call = tuple[float, bool, float, tuple[int, ...] | None]  # eps, is_rms, offset and the normalized shape


@cached_plan
def _plan_call(
    call: Call, x: TensorKey, residual: TensorKey | None, weight: TensorKey | None, bias: TensorKey | None
) -> Callable[..., Any] | None:
    (eps, is_rms, offset, size), (shape, dtype, device) = call, x
    weights = [w for w in (weight, bias) if w]
    weight_dtypes = {w[1] for w in weights} or {dtype}
    fit = all(w[0] == size and w[2] == device for w in weights) and residual in (None, x)
    if (
        not size
        or not isinstance(eps, float)
        or not fit
        or len(weight_dtypes) > 1
        or not weight_dtypes <= {dtype, torch.float32}
    ):
        return None
    if not has_elements(shape, dtype, -len(size)) or shape[-len(size) :] != size:
        return None
    N = math.prod(size)
    dtypes = dtype, residual and dtype, *(w and w[1] for w in (weight, bias))
    launch: Any = _plan_forward(Norm(N, eps, is_rms, offset), dtypes, True, device, math.prod(shape) // N)
    empty = empty_like_options(shape)

    def norm(x: Tensor, residual: None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = torch.empty_like(x, **empty)
        launch(x, None, weight, bias, y, None, None)
        return y

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        y, total = torch.empty_like(x, **empty), torch.empty_like(x, **empty)
        launch(x, residual, weight, bias, y, total, None)
        return y, total

    return norm if residual is None else add_norm


def _call(call: Call, x: Tensor, residual: Tensor | None, weight: Any, bias: Any) -> Any:
    eps, is_rms, offset, size = call
    weights = [w for w in (weight, bias) if w is not None]
    if not size or not isinstance(eps, float) or x.shape[-len(size) :] != size:
        return None
    if not all(isinstance(w, Tensor) and w.shape == size for w in weights):
        return None
    inputs = [x] if residual is None else [x, residual]
    if not weights or weights[0].dtype == x.dtype:
        is_eligible = eligible(*inputs, *weights)
    else:
        is_wide = weights[0].dtype == torch.float32 and weights[0].device == x.device
        is_eligible = is_wide and eligible(*inputs) and eligible(*weights)
    if not is_eligible:
        return None
    return apply_norm(Norm(math.prod(size), eps, is_rms, offset), x, residual, weight, bias)


dispatch = Dispatch(_plan_call, _call)


def require_addable(input: Any, residual: Any) -> None:
    """Raise unless the two can be added without broadcasting; of two dtypes, torch chooses that of the sum."""
    for name, given in (("input", input), ("residual", residual)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
    for what in ("shape", "device"):
        ours, theirs = getattr(input, what), getattr(residual, what)
        if ours != theirs:
            raise ValueError(f"residual must have the {what} of input: {theirs} is not {ours}")
