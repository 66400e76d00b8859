"""Cross entropy of a linear layer: loss = cross_entropy(x W^T + b, y), without ever holding all logits.

The logits of a language model are its largest tensor by far. Here a chunk of rows at a time is made, turned into its
gradient where it lies, and used for the gradients of x and W at once: three products for each chunk, as without chunks,
and one read and write of it. Chunks are few and large, so that the products run at full rate and the gradient of W,
which every chunk adds to, is read and written seldom.

The gradients are made in forward for an incoming gradient of 1, as in `cross_entropy.py`, and multiplied in backward
where that was wrong. Where it would mostly be wrong, and for torch.compile, backward makes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.loss._triton import IGNORED, Options, count, formula, rows, scale, takes, total, validate
from tilewright.runtime.operator import fast_apply, is_observed, operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

CHUNK = 550 * 10**6  # bytes of logits at a time
CHUNK_ROWS = 128  # rows of a chunk are a multiple of this: what a tile of the products has


def reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    wide = (
        logits.float() if logits.dtype == torch.float16 else logits
    )  # where torch's sum for label smoothing overflows
    options = Options(IGNORED, label_smoothing, z_loss, softcap)
    return formula(wide, target, None, reduction, options).to(input.dtype)


def _products(input: Tensor, linear_weight: Tensor) -> float:
    return 2 * input.shape[0] * linear_weight.numel()


def cost(input: Tensor, linear_weight: Tensor, target: Tensor, *_: Any) -> Cost:
    read = input.nbytes + linear_weight.nbytes + target.nbytes
    flops = {matrix_unit(input.dtype): _products(input, linear_weight)}
    return Cost(read=read, written=input.element_size(), flops=flops)


def backward_cost(input: Tensor, linear_weight: Tensor, *_: Any) -> Cost:
    size = input.nbytes + linear_weight.nbytes
    return Cost(read=size, written=size, flops={matrix_unit(input.dtype): 2 * _products(input, linear_weight)})


def inputs(draw: Draw) -> tuple[Any, ...]:
    x, linear_weight = draw.randn("M", "K"), draw.randn("N", "K", scale=2 * max(1, draw["K"]) ** -0.5)
    target = draw.randint("M", high="N")
    if not draw["extras"]:
        return x, linear_weight, target, None, draw["reduction"], 0.0, 0.0, None
    return x, linear_weight, target, draw.randn("N"), draw["reduction"], 0.1, 1e-2, 5.0


op = Op(
    "linear_cross_entropy",
    reference,
    cost,
    inputs,
    check=points(
        M=(1, 3, 37, 61),
        K=(1, 7, 32, 13),
        N=(1, 5, 781, 130),
        reduction=("mean", "none", "mean", "sum"),
        extras=(False, True, False, True),
    ),
    bench=points(M=(8192, 8192), K=(4096, 4096), N=(128256, 32768), reduction=("mean",) * 2, extras=(False,) * 2),
    backward_cost=backward_cost,
    is_one_pass=True,
    takes=lambda case: case["N"] != 0 and case["K"] != 0,
)


def _chunked(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    divisor: Tensor | None,
    options: Options,
    form: str,
    losses: Tensor,
    dloss: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (False, False, False),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Fills the losses, and returns the gradients that are needed of input, linear weight and bias."""
    M, N = input.shape[0], linear_weight.shape[0]
    most = max(1, CHUNK // (N * input.element_size()))
    each = cdiv(M, cdiv(M, most)) if M else 1
    each = min(M, cdiv(each, CHUNK_ROWS) * CHUNK_ROWS if most >= CHUNK_ROWS else each)
    buffer = input.new_empty((each, N))
    dinput = torch.empty_like(input) if needs[0] else None
    dweight = torch.empty_like(linear_weight) if needs[1] else None
    dbias = None
    for start in range(0, M, max(1, each)):
        part = slice(start, min(start + each, M))
        x, logits = input[part], buffer[: min(each, M - start)]
        if bias is None:
            torch.mm(x, linear_weight.t(), out=logits)
        else:
            torch.addmm(bias, x, linear_weight.t(), out=logits)
        scales = dloss if dloss is None or not dloss.dim() else dloss[part]
        into = logits if any(needs) else None
        rows(form, logits, target[part], weight, divisor, options, losses=losses[part], dloss=scales, dlogits=into)
        if dinput is not None:
            torch.mm(logits, linear_weight, out=dinput[part])
        if dweight is not None:
            torch.addmm(dweight, logits.t(), x, beta=float(start > 0), out=dweight)
        if needs[2]:
            sums = logits.sum(0, dtype=torch.float32)
            dbias = sums if dbias is None else dbias.add_(sums)
    return dinput, dweight, None if dbias is None else dbias.to(input.dtype)


def _forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    options: Options,
    form: str,
    needs: tuple[bool, bool, bool] = (False, False, False),
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """The loss, the divisor of a mean, and the gradients that are needed."""
    x = input.contiguous().view(-1, input.shape[-1])
    M, N = x.shape[0], linear_weight.shape[0]
    target, weight = target.contiguous().view(-1), None if weight is None else weight.contiguous()
    divisor = count(target, weight, M, N, options) if reduction == "mean" else None
    is_single = reduction != "none"
    losses = x.new_empty(M, dtype=torch.float32 if is_single else input.dtype)
    gradients = _chunked(x, linear_weight, target, bias, weight, divisor, options, form, losses, None, needs)
    loss = total(losses, divisor, input.dtype) if is_single else losses.view(input.shape[:-1])
    return loss, divisor, gradients


def _fake(
    input: Tensor, linear_weight: Tensor, target: Tensor, bias: Any, weight: Any, reduction: str, *_: object
) -> Any:
    loss = input.new_empty(input.shape[:-1] if reduction == "none" else ())
    return loss, input.new_empty(() if reduction == "mean" else 0, dtype=torch.float32)


@operator("linear_cross_entropy", fake=_fake)
def linear_cross_entropy_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    form: str,
) -> tuple[Tensor, Tensor]:
    """The loss by the named form, and what a mean divides by."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    loss, divisor, _ = _forward(input, linear_weight, target, linear_bias, weight, reduction, options, form)
    return loss, input.new_empty(0, dtype=torch.float32) if divisor is None else divisor


def _fake_backward(input: Tensor, linear_weight: Tensor, dloss: Tensor, target: Tensor, bias: Any, *args: Any) -> Any:
    likes = (input, linear_weight, input.new_empty(linear_weight.shape[0]))
    return tuple(torch.empty_like(a) if need else input.new_empty(0) for a, need in zip(likes, args[-3:], strict=True))


@operator("linear_cross_entropy_backward", fake=_fake_backward)
def linear_cross_entropy_backward(
    input: Tensor,
    linear_weight: Tensor,
    dloss: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    divisor: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    form: str,
    needs_input: bool,
    needs_linear_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, linear weight and bias, by making the logits again; empty where they are not needed."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    x = input.contiguous().view(-1, input.shape[-1])
    target, weight = target.contiguous().view(-1), None if weight is None else weight.contiguous()
    over, dloss = divisor if reduction == "mean" else None, dloss.contiguous()
    losses = x.new_empty(x.shape[0], dtype=torch.float32)
    needs = needs_input, needs_linear_weight, needs_bias
    found = _chunked(x, linear_weight, target, linear_bias, weight, over, options, form, losses, dloss, needs)
    dinput, dweight, dbias = (input.new_empty(0) if gradient is None else gradient for gradient in found)
    return dinput.view(input.shape) if needs_input else dinput, dweight, dbias


def _save(ctx, inputs, output) -> None:
    input, linear_weight, target, bias, weight, *ctx.options = inputs
    ctx.save_for_backward(input, linear_weight, target, bias, weight, output[1])
    ctx.set_materialize_grads(False)
    if output[1] is not None:
        ctx.mark_non_differentiable(output[1])


def _needs(ctx) -> tuple[bool, bool, bool]:
    return ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]


def _gradients(dinput: Any, dweight: Any, dbias: Any) -> tuple[Any, ...]:
    """One for each argument of forward."""
    return dinput, dweight, None, dbias, *(None,) * 7


def _backward(ctx, dloss: Tensor | None, *_: object):
    if dloss is None:
        return _gradients(None, None, None)
    input, linear_weight, target, bias, weight, divisor = ctx.saved_tensors
    reduction, ignore_index, *more, _ = ctx.options
    needs = _needs(ctx)
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        logits = torch.nn.functional.linear(input, linear_weight, bias)
        loss = formula(logits, target, weight, reduction, Options(ignore_index, *more))
        wanted = [a for a, need in zip((input, linear_weight, bias), needs, strict=True) if need]
        found = iter(torch.autograd.grad(loss, wanted, dloss, create_graph=True))
    else:
        args = (input, linear_weight, dloss, target, bias, weight, divisor, *ctx.options, *needs)
        found = (g for g, need in zip(linear_cross_entropy_backward(*args), needs, strict=True) if need)
    return _gradients(*(next(found) if need else None for need in needs))


linear_cross_entropy_forward.differentiate(_save, _backward)


class _AtOnce(torch.autograd.Function):
    """Forward makes the gradients too, for an incoming gradient of 1."""

    @staticmethod
    def forward(ctx, *args):
        *tensors, reduction, ignore_index, label_smoothing, z_loss, softcap, form = args
        options = Options(ignore_index, label_smoothing, z_loss, softcap)
        loss, divisor, ctx.gradients = _forward(*tensors, reduction, options, form, _needs(ctx))
        _save(ctx, args, (loss, loss.new_empty(0) if divisor is None else divisor))
        return loss

    @staticmethod
    def backward(ctx, dloss):  # type: ignore[override]
        # Autograd may give the gradients away as they are: they serve one backward. Another makes its own.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None or torch.is_grad_enabled() or dloss is None:
            return _backward(ctx, dloss)
        for gradient in gradients:
            if gradient is not None:
                scale(gradient, dloss)
        return _gradients(*gradients)


_at_once = fast_apply(_AtOnce, (0, 1, 2, 3, 4))


def _linear_cross_entropy(*args: Any) -> Tensor:
    input, reduction = args[0], args[5]
    needs_grad = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (*args[:2], args[3]))
    if needs_grad and reduction != "none" and input.dtype != torch.float16 and not is_observed():
        return _at_once(*args)
    return linear_cross_entropy_forward(*args)[0]


@op.kernel("triton", language="triton", fits=lambda input, *_: input.numel() > 0)
def triton_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    options = (IGNORED, label_smoothing, z_loss, softcap)
    return _linear_cross_entropy(input, linear_weight, target, linear_bias, None, reduction, *options, "triton")


SMALLEST = 2**26  # logits; below this the host's time counts, and torch's call costs less of it


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """As `torch.nn.functional.linear_cross_entropy` for a weight [C, K]: `cross_entropy` with all its options of
    `linear(input, linear_weight, linear_bias)`, without holding the logits."""
    validate(z_loss, softcap)
    options = Options(IGNORED if ignore_index is None else ignore_index, label_smoothing, z_loss, softcap)
    if _takes(input, linear_weight, target, linear_bias, weight, reduction, options):
        numbers = (float(label_smoothing), float(z_loss), None if softcap is None else float(softcap))
        args = (input, linear_weight, target, linear_bias, weight, reduction, options.ignore_index, *numbers)
        return _linear_cross_entropy(*args, "best")
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    return formula(logits, target, weight, reduction, options)


def _takes(
    input: Any, linear_weight: Any, target: Any, bias: Any, weight: Any, reduction: str, options: Options
) -> bool:
    floats = [input, linear_weight] if bias is None else [input, linear_weight, bias]
    if not all(isinstance(t, Tensor) for t in floats) or not input.dim() or not input.numel():
        return False
    K, N = input.shape[-1], linear_weight.shape[0] if linear_weight.dim() == 2 else 0
    fits = linear_weight.shape == (N, K) and (bias is None or bias.shape == (N,))
    shape = torch.Size((*input.shape[:-1], N))
    return fits and takes(SMALLEST, shape, floats, target, weight, reduction, options) and target.dtype == torch.int64


@op.public
def public(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    return linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, reduction=reduction, **options)
