"""Residual and RMS norm: s = x + residual; y = s / sqrt(mean s² + eps) (offset + w), by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cuda import fits_a_cluster
from tilewright.ops.norm._operators import EPS, add_normed, plain_rms_norm, require_alike, takes, without_infinities
from tilewright.spec import Cost, Draw, Op, grid, points


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_rms_norm(total, x.shape[-1:], weight, eps, weight_offset), total


def _bytes(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.nbytes


def cost(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    return Cost(read=2 * x.nbytes + _bytes(weight), written=2 * x.nbytes, flops={"fp32": 5 * x.numel()})


def backward_cost(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    """Both inputs have one gradient."""
    flops = {"fp32": 13 * x.numel()}
    return Cost(read=3 * x.nbytes + _bytes(weight), written=x.nbytes + _bytes(weight), flops=flops)


def _inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor | None, float, float]:
    weight = None if draw["weight"] == "none" else draw.randn("N")
    if weight is not None and draw["weight"] == "fp32":
        weight = weight.float()
    x, residual = (without_infinities(draw, draw.randn("M", "N")) for _ in range(2))
    return x, residual, weight, 1e-6, 1.0 if draw["weight"] == "offset" else 0.0


op = Op(
    "add_rms_norm",
    reference,
    cost,
    inputs=_inputs,
    check=[
        *grid(M=(1, 17), N=(1, 781), weight=("same",)),
        *points(M=(5, 3, 7, 3), N=(1024, 61, 96, 7), weight=("same", "none", "fp32", "offset")),
        *points(M=(300, 3, 2, 2), N=(40, 5000, 9000, 33000), weight=("same",) * 4),
    ],
    bench=points(
        M=(32768, 32768, 16384, 16384, 8192, 4096),
        N=(1024, 2048, 4096, 8192, 16384, 32768),
        weight=("same",) * 6,
    ),
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    return add_normed(x, residual, weight, None, x.shape[-1], eps, weight_offset, True, "triton")


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_a_cluster(x))
def cuda_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    return add_normed(x, residual, weight, None, x.shape[-1], eps, weight_offset, True, "cuda")


SMALLEST = 0  # elements: one launch costs the host less than torch's two, and no input is too small for that


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`rms_norm(input + residual, …)` and that sum, in one pass."""
    require_alike(input, residual)
    if (eps is None or isinstance(eps, float)) and takes(SMALLEST, normalized_shape, (input, residual), (weight,)):
        N = math.prod(normalized_shape)
        return add_normed(input, residual, weight, None, N, EPS if eps is None else eps, weight_offset, True, "best")
    total = input + residual
    return plain_rms_norm(total, normalized_shape, weight, eps, weight_offset), total


@op.public
def public(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, x.shape[-1:], weight, eps, weight_offset=weight_offset)
