"""Cross entropy of a linear layer: loss = cross_entropy(x W^T + b, y), without ever holding all logits.

The logits of a language model are by far its largest tensor. Here one chunk of rows is computed at a time, overwritten
by its gradient, and used for the gradients of x and W immediately: three GEMMs per chunk, as many as without chunks,
and one read and write of the chunk. Chunks are few and large, so that the GEMMs run at full rate and the gradient of W,
which every chunk adds to, is read and written rarely.

The gradients are computed in forward for an incoming gradient of 1, as in `cross_entropy.py`, and scaled in backward
where that was wrong. Where it would mostly be wrong, and for torch.compile, backward recomputes the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.loss._autograd import fused_apply
from tilewright.ops.loss._options import IGNORE_INDEX, CrossEntropy, eligible_loss, torch_cross_entropy
from tilewright.ops.loss._plans import launch_rows, mean_divisor, sum_losses
from tilewright.runtime.crossovers import Crossover, faster_after
from tilewright.runtime.operator import is_observed, needs_gradient, operator, scatter
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["linear_cross_entropy"]

CHUNK = 550 * 10**6  # bytes of logits at a time
CHUNK_ROWS = 128  # rows of a chunk are a multiple of this, the rows of a GEMM tile


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
    if input.dtype == torch.float16:  # torch's sum for label smoothing overflows in it
        logits = logits.float()
    options = CrossEntropy(IGNORE_INDEX, reduction, label_smoothing, z_loss, softcap)
    return torch_cross_entropy(logits, target, None, options).to(input.dtype)


def _gemm_flops(input: Tensor, linear_weight: Tensor) -> float:
    return 2 * input.shape[0] * linear_weight.numel()


def cost(input: Tensor, linear_weight: Tensor, target: Tensor, *_: Any) -> Cost:
    read = input.nbytes + linear_weight.nbytes + target.nbytes
    flops = {matrix_unit(input.dtype): _gemm_flops(input, linear_weight)}
    return Cost(read=read, written=input.element_size(), flops=flops)


def backward_cost(input: Tensor, linear_weight: Tensor, *_: Any) -> Cost:
    size = input.nbytes + linear_weight.nbytes
    return Cost(read=size, written=size, flops={matrix_unit(input.dtype): 2 * _gemm_flops(input, linear_weight)})


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


class _Inputs(NamedTuple):
    """The tensors of a call, with the rows in one dimension."""

    x: Tensor  # [M, K]
    linear_weight: Tensor  # [N, K]
    target: Tensor  # [M]
    bias: Tensor | None  # [N]
    weight: Tensor | None  # [N]

    @classmethod
    def of(
        cls, input: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None
    ) -> _Inputs:
        x, target = input.contiguous().view(-1, input.shape[-1]), target.contiguous().view(-1)
        return cls(x, linear_weight, target, bias, None if weight is None else weight.contiguous())

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x.shape[0], self.linear_weight.shape[0]


NO_GRADIENTS = (False, False, False)  # for input, linear weight and bias


def _chunked(
    options: CrossEntropy,
    inputs: _Inputs,
    divisor: Tensor | None,
    losses: Tensor,
    dloss: Tensor | None = None,
    wanted: Sequence[bool] = NO_GRADIENTS,
) -> list[Tensor]:
    """Fill the losses, and return the wanted gradients of input, linear weight and bias."""
    input, linear_weight, target, bias, weight = inputs
    M, N = inputs.sizes
    max_rows = max(1, CHUNK // (N * input.element_size()))
    rows = cdiv(M, cdiv(M, max_rows)) if M else 1
    rows = min(M, cdiv(rows, CHUNK_ROWS) * CHUNK_ROWS if max_rows >= CHUNK_ROWS else rows)
    buffer = input.new_empty((rows, N))
    dinput = torch.empty_like(input) if wanted[0] else None
    # In the weight's own dtype, every chunk would round the sum of all chunks before it.
    is_wide = options.is_wide and rows < M and linear_weight.dtype != torch.float32
    dweight = torch.empty_like(linear_weight, dtype=torch.float32 if is_wide else None) if wanted[1] else None
    dbias = None
    for start in range(0, M, max(1, rows)):
        chunk = slice(start, min(start + rows, M))
        x, logits = input[chunk], buffer[: min(rows, M - start)]
        if bias is None:
            torch.mm(x, linear_weight.t(), out=logits)
        else:
            torch.addmm(bias, x, linear_weight.t(), out=logits)
        scale = dloss if dloss is None or not dloss.dim() else dloss[chunk]
        results = {"dloss": scale, "dlogits": logits if any(wanted) else None}
        launch_rows(options, logits, target[chunk], weight, divisor, losses=losses[chunk], **results)
        if dinput is not None:
            torch.mm(logits, linear_weight, out=dinput[chunk])
        if dweight is not None:
            _add_product(dweight, logits.t(), x, float(start > 0))
        if wanted[2]:
            sums = logits.sum(0, dtype=torch.float32)
            dbias = sums if dbias is None else dbias.add_(sums)
    gradients = dinput, dweight, dbias
    return [gradient.to(input.dtype) for gradient in gradients if gradient is not None]


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """Compute total = beta total + a b in place; the total may be fp32 where the factors are not."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def _forward(
    options: CrossEntropy, *args: Any, wanted: Sequence[bool] = NO_GRADIENTS
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Return the loss with the divisor of a mean, and the wanted gradients."""
    input, inputs = args[0], _Inputs.of(*args)
    M, N = inputs.sizes
    divisor = mean_divisor(inputs.target, inputs.weight, M, N, options)
    dtype = options.loss_dtype(input.dtype)
    losses = input.new_empty(M, dtype=torch.float32 if options.is_scalar else dtype)
    gradients = _chunked(options, inputs, divisor, losses, None, wanted)
    loss = sum_losses(losses, divisor, dtype) if options.is_scalar else losses.view(input.shape[:-1])
    return (loss, input.new_empty(0, dtype=torch.float32) if divisor is None else divisor), gradients


def _fake(input: Tensor, linear_weight: Tensor, target: Tensor, bias: Any, weight: Any, options: CrossEntropy) -> Any:
    loss = input.new_empty(() if options.is_scalar else input.shape[:-1], dtype=options.loss_dtype(input.dtype))
    return loss, input.new_empty(() if options.reduction == "mean" else 0, dtype=torch.float32)


@operator("linear_cross_entropy", fake=_fake)
def linear_cross_entropy_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropy,
) -> tuple[Tensor, Tensor]:
    """The loss, and the divisor of a mean."""
    return _forward(options, input, linear_weight, target, linear_bias, weight)[0]


def _fake_backward(input: Tensor, linear_weight: Tensor, *args: Any) -> list[Tensor]:
    *_, wanted, _ = args
    likes = (input, linear_weight, input.new_empty(linear_weight.shape[0]))
    return [torch.empty_like(like) for like in itertools.compress(likes, wanted)]


@operator("linear_cross_entropy_backward", fake=_fake_backward)
def linear_cross_entropy_backward(
    input: Tensor,
    linear_weight: Tensor,
    dloss: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    divisor: Tensor,
    wanted: Sequence[bool],
    options: CrossEntropy,
) -> list[Tensor]:
    """The wanted gradients of input, linear weight and bias, from recomputed logits."""
    inputs = _Inputs.of(input, linear_weight, target, linear_bias, weight)
    over = divisor if options.reduction == "mean" else None
    losses = inputs.x.new_empty(inputs.x.shape[0], dtype=torch.float32)
    gradients = _chunked(options, inputs, over, losses, dloss.contiguous(), wanted)
    return [gradients[0].view(input.shape), *gradients[1:]] if wanted[0] else gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.options = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    return ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]


def _by_argument(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients in the order of forward's arguments."""
    dinput, dweight, dbias = scatter(gradients, wanted)
    return dinput, dweight, None, dbias


def _backward(ctx: Any, dloss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,)
    input, linear_weight, target, bias, weight, divisor = ctx.saved_tensors
    wanted = _wanted(ctx)
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        logits = torch.nn.functional.linear(input, linear_weight, bias)
        loss = torch_cross_entropy(logits, target, weight, ctx.options)
        tensors = [*itertools.compress((input, linear_weight, bias), wanted)]
        gradients: Sequence[Tensor] = torch.autograd.grad(loss, tensors, dloss, create_graph=True)
    else:
        tensors = (input, linear_weight, dloss, target, bias, weight, divisor)
        gradients = linear_cross_entropy_backward(*tensors, wanted, ctx.options)
    return _by_argument(gradients, wanted)


linear_cross_entropy_forward.differentiate(_save, _backward)


def _forward_with_gradients(ctx: Any, *args: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
    *tensors, options = args
    wanted = _wanted(ctx)
    output, gradients = _forward(options, *tensors, wanted=wanted)
    return output, _by_argument(gradients, wanted)


_apply_fused = fused_apply(_forward_with_gradients, _save, _backward, (0, 1, 2, 3, 4))


def _linear_cross_entropy(*args: Any) -> Tensor:
    input, linear_weight, _, bias, _, options = args
    needs_grad = needs_gradient(input, linear_weight, bias)
    if needs_grad and options.is_scalar and input.dtype != torch.float16 and not is_observed():
        return _apply_fused(*args)
    return linear_cross_entropy_forward(*args)[0]


@op.kernel("triton", language="triton", fits=lambda input, *_: input.numel() > 0)
def triton_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *options: Any
) -> Tensor:
    triton = CrossEntropy(IGNORE_INDEX, *options, form="triton")
    return _linear_cross_entropy(input, linear_weight, target, linear_bias, None, triton)


CROSSOVER = Crossover(
    "linear_cross_entropy",
    faster_after(us=28, bytes_per_element=2),
    unit="logits",
    size=lambda input, linear_weight, *_: input.numel() // input.shape[-1] * linear_weight.shape[0],
)


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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross entropy of a linear layer, with the arguments of `torch.nn.functional.linear_cross_entropy`.

    The same as `cross_entropy`, with all its options, of `linear(input, linear_weight, linear_bias)`, for a weight
    [C, K], but the logits are never all in memory. The loss has the dtype of the input, or is fp32 with
    `dtype=torch.float32`, as for a sum over many tokens; the gradient of the weight is then also added up in fp32.
    """
    if dtype not in (None, torch.float32):
        raise ValueError(f"dtype must be None or torch.float32, not {dtype}")
    ignored = IGNORE_INDEX if ignore_index is None else ignore_index
    options = CrossEntropy(ignored, reduction, label_smoothing, z_loss, softcap, is_wide=dtype is not None)
    options.validate()
    if _is_eligible(input, linear_weight, target, linear_bias, weight, options):
        return _linear_cross_entropy(input, linear_weight, target, linear_bias, weight, options.with_floats())
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    return torch_cross_entropy(logits, target, weight, options)


def _is_eligible(input: Any, linear_weight: Any, target: Any, bias: Any, weight: Any, options: CrossEntropy) -> bool:
    floats = [input, linear_weight] if bias is None else [input, linear_weight, bias]
    if not all(isinstance(t, Tensor) for t in floats) or not input.dim() or not input.numel():
        return False
    K, N = input.shape[-1], linear_weight.shape[0] if linear_weight.dim() == 2 else 0
    fits = linear_weight.shape == (N, K) and (bias is None or bias.shape == (N,))
    shape = torch.Size((*input.shape[:-1], N))
    return fits and eligible_loss(CROSSOVER, shape, floats, target, weight, options) and target.dtype == torch.int64


@op.public
def public(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, reduction: str, *numbers: Any
) -> Tensor:
    options = dict(zip(("label_smoothing", "z_loss", "softcap"), numbers, strict=True))
    return linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, reduction=reduction, **options)
