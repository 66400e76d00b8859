"""Cross entropy of logits and targets: loss = -log softmax(z)[y], with class weights, smoothing, z-loss and soft-cap.

z_loss adds z_loss lse² to the loss of a row, lse = log sum exp z, which keeps logits from drifting; softcap replaces z
by cap tanh(z / cap), which keeps them small. `_triton.py` has the formulas with all options.

Forward and backward together read the logits once and write their gradient once, if the gradient is computed while the
row is in registers. Forward cannot know the incoming gradient, but for a scalar loss it mostly is 1: the gradient is
computed for 1, and backward scales it where that was wrong. For one loss per row, where 1 would mostly be wrong, for
fp16, where small gradients would underflow before a loss scale is applied, and for torch.compile, backward computes the
gradient from the logits and each row's lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from tilewright.ops.loss._autograd import fused_apply
from tilewright.ops.loss._options import IGNORE_INDEX, CrossEntropy, eligible_loss, torch_cross_entropy
from tilewright.ops.loss._plans import launch_rows, mean_divisor, sum_losses
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.runtime.launch import MAX_INT32
from tilewright.runtime.operator import contiguous_like, is_observed, needs_gradient, operator
from tilewright.spec import Cost, Draw, Op, points

__all__ = ["cross_entropy"]


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
    wide = input.float() if input.dtype == torch.float16 else input  # torch's sum for label smoothing overflows in fp16
    options = CrossEntropy(ignore_index, reduction, label_smoothing, z_loss, softcap)
    return torch_cross_entropy(wide, target, weight, options).to(input.dtype)


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
        return draw.randn("M", "N", scale=2.0), target, None, IGNORE_INDEX, draw["reduction"], 0.0, 0.0, None
    target = target.masked_fill(draw.randint("M", high=5) == 0, IGNORE_INDEX)
    return draw.randn("M", "N", scale=2.0), target, None, IGNORE_INDEX, draw["reduction"], 0.1, 1e-2, 5.0


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
        M=(8192, 4096, 4096),  # for more logits the reference would not fit in memory beside the timed inputs
        N=(32768, 128256, 50257),
        reduction=("mean",) * 3,
        extras=(False,) * 3,
    ),
    backward_cost=backward_cost,
    is_one_pass=True,
    takes=lambda case: case["N"] != 0,
    grows="M",
    draws={"N": "vocabulary"},
    mutates=lambda *_: (0,),  # Liger overwrites the logits with their gradient; our kernels do not
)


def _contiguous(*tensors: Any) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _rows(input: Tensor) -> Tensor:
    logits = input.contiguous()
    return logits if logits.dim() == 2 else logits.view(-1, logits.shape[-1])


def _forward(
    input: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy, dlogits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, stats and divisor; fill `dlogits` if given."""
    logits = _rows(input)
    target, weight = _contiguous(target, weight)
    M, N = logits.shape
    divisor = mean_divisor(target, weight, M, N, options)
    losses = logits.new_empty(M, dtype=torch.float32 if options.is_scalar else input.dtype)
    stats = logits.new_empty(2, M, dtype=torch.float32)
    launch_rows(options, logits, target, weight, divisor, losses=losses, stats=stats, dlogits=dlogits)
    loss = sum_losses(losses, divisor, input.dtype) if options.is_scalar else losses.view(input.shape[:-1])
    return loss, stats, stats.new_empty(0) if divisor is None else divisor


def _fake(input: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy) -> Any:
    loss = input.new_empty(() if options.is_scalar else input.shape[:-1])
    stats = input.new_empty((2, input.numel() // input.shape[-1]), dtype=torch.float32)
    return loss, stats, stats.new_empty(() if options.reduction == "mean" else 0)


@operator("cross_entropy", fake=_fake)
def cross_entropy_forward(
    input: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and what its gradient needs: lse and the derivative by it of each row, and the divisor of a mean."""
    return _forward(input, target, weight, options)


def _fake_backward(input: Tensor, *_: object) -> Tensor:
    return contiguous_like(input)


@operator("cross_entropy_backward", fake=_fake_backward)
def cross_entropy_backward(
    input: Tensor,
    dloss: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    divisor: Tensor,
    options: CrossEntropy,
) -> Tensor:
    """The gradient of the logits, from the incoming one and what forward returned."""
    dlogits = contiguous_like(input)
    target, weight, dloss = _contiguous(target, weight, dloss)
    over = divisor if options.reduction == "mean" else None
    options = options._replace(z_loss=0.0)  # stats contain it
    launch_rows(options, _rows(input), target, weight, over, stats=stats, dloss=dloss, dlogits=dlogits)
    return dlogits


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.options = inputs
    _, stats, divisor = output
    ctx.save_for_backward(*tensors, stats, divisor)
    ctx.mark_non_differentiable(stats, divisor)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,)
    input, target, weight, stats, divisor = ctx.saved_tensors
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        loss = torch_cross_entropy(input, target, weight, ctx.options)
        return torch.autograd.grad(loss, input, dloss, create_graph=True)
    return (cross_entropy_backward(input, dloss, target, weight, stats, divisor, ctx.options),)


cross_entropy_forward.differentiate(_save, _backward)


def _forward_with_gradient(ctx: Any, input: Tensor, *args: Any) -> tuple[Any, tuple[Tensor]]:
    gradient = contiguous_like(input)
    return _forward(input, *args, gradient), (gradient,)


_apply_fused = fused_apply(_forward_with_gradient, _save, _backward, (0, 1, 2))


def _cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy) -> Tensor:
    if options.is_scalar and input.dtype != torch.float16 and needs_gradient(input) and not is_observed():
        return _apply_fused(input, target, weight, options)
    return cross_entropy_forward(input, target, weight, options)[0]


@op.kernel("triton", language="triton", fits=lambda input, *_: input.shape[-1] <= MAX_INT32)
def triton_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    return _cross_entropy(input, target, weight, CrossEntropy(*options, form="triton"))


@op.kernel("cuda", language="cuda", fits=lambda input, *_: input.shape[-1] <= MAX_INT32)
def cuda_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    return _cross_entropy(input, target, weight, CrossEntropy(*options))


CROSSOVER = Crossover("cross_entropy", faster_after(us=3.5, bytes_per_element=2), captured=always, unit="logits")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy, with the arguments of `torch.nn.functional.cross_entropy`.

    With `softcap`, the logits are `softcap * tanh(input / softcap)`. `z_loss * logsumexp(logits)**2` is added to the
    loss of each row. On a GPU the loss of a row whose target is no valid class is NaN, and so is its gradient.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    options = CrossEntropy(ignore_index, reduction, label_smoothing, z_loss, softcap)
    options.validate()
    if isinstance(input, Tensor) and eligible_loss(CROSSOVER, input.shape, [input], target, weight, options):
        return _cross_entropy(input, target, weight, options.with_floats())
    return torch_cross_entropy(input, target, weight, options)


@op.public
def public(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, *numbers: Any
) -> Tensor:
    options = dict(zip(("label_smoothing", "z_loss", "softcap"), numbers, strict=True))
    return cross_entropy(input, target, weight, None, ignore_index, None, reduction, **options)
