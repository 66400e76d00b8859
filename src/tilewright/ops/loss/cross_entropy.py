"""Cross entropy of logits and targets: loss = -log softmax(z)[y], with class weights, smoothing, z-loss and soft-cap.

z_loss adds z_loss lse² to the loss of a row, lse = log sum exp z, which keeps logits from drifting; softcap takes
cap tanh(z / cap) for z, which keeps them small. `_cross_entropy.py` has the formulas with all options.

Forward and backward together need to read the logits once and to write their gradient once, if the gradient is made
while a row is at hand. Forward cannot know the incoming gradient, but that of a loss which is a single number is mostly
1: so the gradient is made for 1, and backward multiplies it where that was wrong. For a loss of each row, where it
would mostly be wrong, for fp16, where small numbers would be lost before a scaled loss makes them large, and for
torch.compile, backward makes the gradient from the logits and each row's lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from tilewright.ops.loss._triton import (
    IGNORED,
    Options,
    count,
    formula,
    rows,
    scale,
    takes,
    total,
    validate,
)
from tilewright.runtime.launch import MAX_INT32
from tilewright.runtime.operator import contiguous_like, fast_apply, is_observed, operator
from tilewright.spec import Cost, Draw, Op, points


def reference(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    wide = input.float() if input.dtype == torch.float16 else input  # where torch's sum for label smoothing overflows
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    return formula(wide, target, weight, reduction, options).to(input.dtype)


def cost(input: Tensor, target: Tensor, *_: Any) -> Cost:
    return Cost(
        read=input.nbytes + target.nbytes,
        written=input.element_size(),
        flops={"fp32": 4 * input.numel(), "special": input.numel()},
    )


def backward_cost(input: Tensor, *_: Any) -> Cost:
    return Cost(read=0, written=input.nbytes, flops={"fp32": 2 * input.numel()})


def inputs(draw: Draw) -> tuple[Any, ...]:
    target = draw.randint("M", high="N")
    if not draw["extras"]:
        return draw.randn("M", "N", scale=2.0), target, None, IGNORED, draw["reduction"], 0.0, 0.0, None
    target = target.masked_fill(draw.randint("M", high=5) == 0, IGNORED)
    return draw.randn("M", "N", scale=2.0), target, None, IGNORED, draw["reduction"], 0.1, 1e-2, 5.0


op = Op(
    "cross_entropy",
    reference,
    cost,
    inputs,
    check=points(
        M=(1, 3, 67, 31, 5, 2, 1),
        N=(1, 2, 127, 781, 4099, 33000, 40961),
        reduction=("mean", "none", "mean", "sum", "mean", "none", "mean"),
        extras=(False, True, False, True, True, False, True),
    ),
    bench=points(
        M=(8192, 4096, 4096),  # the truth of more logits, and what leads to it, would not fit beside the timed inputs
        N=(32768, 128256, 50257),
        reduction=("mean",) * 3,
        extras=(False,) * 3,
    ),
    backward_cost=backward_cost,
    is_one_pass=True,
    takes=lambda case: case["N"] != 0,
    grows="M",
    mutates=lambda *_: (0,),  # Liger's users let it write the gradient over the logits; ours leaves them as they are
)


def _rows_of(input: Tensor) -> Tensor:
    rows = input.contiguous()
    return rows if rows.dim() == 2 else rows.view(-1, rows.shape[-1])


def _whole(*tensors: Any) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    options: Options,
    form: str,
    dlogits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, stats and divisor; with `dlogits` the gradient too."""
    logits = _rows_of(input)
    target, weight = _whole(target, weight)
    M, N = logits.shape
    divisor = count(target, weight, M, N, options) if reduction == "mean" else None
    is_single = reduction != "none"
    losses = logits.new_empty(M, dtype=torch.float32 if is_single else input.dtype)
    stats = logits.new_empty(2, M, dtype=torch.float32)
    rows(form, logits, target, weight, divisor, options, losses=losses, stats=stats, dlogits=dlogits)
    loss = total(losses, divisor, input.dtype) if is_single else losses.view(input.shape[:-1])
    return loss, stats, stats.new_empty(0) if divisor is None else divisor


def _fake(input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, *_: object) -> Any:
    loss = input.new_empty(input.shape[:-1] if reduction == "none" else ())
    stats = input.new_empty((2, input.numel() // input.shape[-1]), dtype=torch.float32)
    return loss, stats, stats.new_empty(() if reduction == "mean" else 0)


@operator("cross_entropy", fake=_fake)
def cross_entropy_forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss by the named form, and what its gradient needs: lse and its slope for each row, and the divisor."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    return _forward(input, target, weight, reduction, options, form)


@operator("cross_entropy_backward", fake=contiguous_like)
def cross_entropy_backward(
    input: Tensor,
    dloss: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    divisor: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    form: str,
) -> Tensor:
    """The gradient of the logits from them, the incoming gradient and what forward left."""
    dlogits = contiguous_like(input)
    target, weight, dloss = _whole(target, weight, dloss)
    options = Options(ignore_index, label_smoothing, 0.0, softcap)  # z-loss is in stats
    over = divisor if reduction == "mean" else None
    rows(form, _rows_of(input), target, weight, over, options, stats=stats, dloss=dloss, dlogits=dlogits)
    return dlogits


def _save(ctx, inputs, output) -> None:
    input, target, weight, *ctx.options = inputs
    _, stats, divisor = output
    ctx.save_for_backward(input, target, weight, stats, divisor)
    ctx.mark_non_differentiable(stats, divisor)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss: Tensor | None, *_: object):
    none = (None,) * 8
    if dloss is None:
        return None, *none
    input, target, weight, stats, divisor = ctx.saved_tensors
    ignore_index, reduction, label_smoothing, z_loss, softcap, form = ctx.options
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        options = Options(ignore_index, label_smoothing, z_loss, softcap)
        loss = formula(input, target, weight, reduction, options)
        return *torch.autograd.grad(loss, input, dloss, create_graph=True), *none
    args = (input, dloss, target, weight, stats, divisor)
    return cross_entropy_backward(*args, ignore_index, reduction, label_smoothing, softcap, form), *none


cross_entropy_forward.differentiate(_save, _backward)


class _AtOnce(torch.autograd.Function):
    """Forward makes the gradient too, for an incoming gradient of 1."""

    @staticmethod
    def forward(ctx, *args):
        input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, form = args
        ctx.gradient = contiguous_like(input)
        options = Options(ignore_index, label_smoothing, z_loss, softcap)
        output = _forward(input, target, weight, reduction, options, form, ctx.gradient)
        _save(ctx, args, output)
        return output[0]

    @staticmethod
    def backward(ctx, dloss):  # type: ignore[override]
        # Autograd may give the gradient away as it is: it serves one backward. Another makes its own.
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None or torch.is_grad_enabled() or dloss is None:
            return _backward(ctx, dloss)
        scale(gradient, dloss)
        return gradient, *(None,) * 8


_at_once = fast_apply(_AtOnce, (0, 1, 2))


def _cross_entropy(*args: Any) -> Tensor:
    input, reduction = args[0], args[4]
    at_once = input.requires_grad and reduction != "none" and input.dtype != torch.float16
    if at_once and torch.is_grad_enabled() and not is_observed():
        return _at_once(*args)
    return cross_entropy_forward(*args)[0]


@op.kernel("triton", language="triton", fits=lambda input, *_: input.shape[-1] <= MAX_INT32)
def triton_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    return _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, "triton")


@op.kernel("cuda", language="cuda", fits=lambda input, *_: input.shape[-1] <= MAX_INT32)
def cuda_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    return _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, "best")


SMALLEST = 2**23  # elements; below this torch takes less time than our call costs the host


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """As `torch.nn.functional.cross_entropy`, of `softcap * tanh(input / softcap)` where `softcap` is given, with
    `z_loss * logsumexp(input)**2` added for each row: the fast kernels where they fit, torch elsewhere.

    On a GPU the loss of a row whose target is no class is NaN, and so is its gradient.
    """
    validate(z_loss, softcap)
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    if isinstance(input, Tensor) and takes(SMALLEST, input.shape, [input], target, weight, reduction, options):
        smoothing, cap = float(label_smoothing), None if softcap is None else float(softcap)
        return _cross_entropy(input, target, weight, ignore_index, reduction, smoothing, float(z_loss), cap, "best")
    return formula(input, target, weight, reduction, options)


@op.public
def public(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    return cross_entropy(
        input, target, weight, None, ignore_index, None, reduction, label_smoothing, z_loss=z_loss, softcap=softcap
    )
