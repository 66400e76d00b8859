"""Residual and layer norm: s = x + residual; y = (s - mean s) / sqrt(var s + eps) w + b, by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cuda import fits_a_cluster
from tilewright.ops.norm._operators import add_normed, plain_layer_norm, require_alike, takes
from tilewright.spec import Cost, Draw, Op, grid, points

EPS = 1e-5  # that of torch's layer_norm


def reference(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def _bytes(*weights: Tensor | None) -> int:
    return sum(w.nbytes for w in weights if w is not None)


def cost(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    return Cost(read=2 * x.nbytes + _bytes(weight, bias), written=2 * x.nbytes, flops={"fp32": 7 * x.numel()})


def backward_cost(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    """Both inputs have one gradient."""
    flops = {"fp32": 17 * x.numel()}
    return Cost(read=3 * x.nbytes + _bytes(weight), written=x.nbytes + _bytes(weight, bias), flops=flops)


def _inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    kind = draw["affine"]
    weight = draw.randn("N") if kind in ("same", "fp32", "weight") else None
    bias = draw.randn("N") if kind in ("same", "fp32", "bias") else None
    if kind == "fp32" and weight is not None and bias is not None:
        weight, bias = weight.float(), bias.float()
    return draw.randn("M", "N"), draw.randn("M", "N"), weight, bias


op = Op(
    "add_layer_norm",
    reference,
    cost,
    inputs=_inputs,
    check=[
        *grid(M=(1, 17), N=(1, 781), affine=("same",)),
        *points(M=(5, 3, 7, 3, 3), N=(1024, 61, 96, 7, 31), affine=("same", "none", "fp32", "weight", "bias")),
        *points(M=(300, 3, 2, 2), N=(40, 5000, 9000, 33000), affine=("same",) * 4),
    ],
    bench=points(
        M=(32768, 32768, 16384, 16384, 8192, 4096),
        N=(1024, 2048, 4096, 8192, 16384, 32768),
        affine=("same",) * 6,
    ),
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return add_normed(x, residual, weight, bias, x.shape[-1], EPS, 0.0, False, "triton")


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_a_cluster(x))
def cuda_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return add_normed(x, residual, weight, bias, x.shape[-1], EPS, 0.0, False, "cuda")


SMALLEST = 0  # elements: one launch costs the host less than torch's two, and no input is too small for that


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """`layer_norm(input + residual, …)` and that sum, in one pass."""
    require_alike(input, residual)
    if isinstance(eps, float) and takes(SMALLEST, normalized_shape, (input, residual), (weight, bias)):
        return add_normed(input, residual, weight, bias, math.prod(normalized_shape), eps, 0.0, False, "best")
    total = input + residual
    return plain_layer_norm(total, normalized_shape, weight, bias, eps), total


@op.public
def public(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return add_layer_norm(x, residual, x.shape[-1:], weight, bias)
