"""Residual add and RMS norm: s = x + residual; y = s / sqrt(mean s² + eps) (offset + w), by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cases import bench_cases, check_cases, draw_weight, parameter_bytes, without_infinities
from tilewright.ops.norm._cuda import fits_cluster
from tilewright.ops.norm._operators import (
    RMS_EPS,
    Norm,
    apply_norm,
    dispatch,
    require_addable,
    torch_rms_norm,
)
from tilewright.runtime.crossovers import Crossover, always
from tilewright.spec import Cost, Draw, Op

__all__ = ["add_rms_norm"]

Pair = tuple[Tensor, Tensor]  # the norm and the sum


def reference(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Pair:
    total = x + residual
    return torch_rms_norm(total, x.shape[-1:], weight, eps, weight_offset), total


def cost(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    return Cost(read=2 * x.nbytes + parameter_bytes(weight), written=2 * x.nbytes, flops={"fp32": 5 * x.numel()})


def backward_cost(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    """Both inputs have the same gradient, which is written once."""
    parameters = parameter_bytes(weight)
    return Cost(read=3 * x.nbytes + parameters, written=x.nbytes + parameters, flops={"fp32": 13 * x.numel()})


def _inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor | None, float, float]:
    weight, offset = draw_weight(draw)
    x, residual = (without_infinities(draw, draw.randn("M", "N")) for _ in range(2))
    return x, residual, weight, 1e-6, offset


op = Op(
    "add_rms_norm",
    reference,
    cost,
    inputs=_inputs,
    check=check_cases(weight=("same", "none", "fp32", "offset")),
    bench=bench_cases(weight="same"),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "hidden"},
)


def _norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, form: str) -> Pair:
    return apply_norm(Norm(x.shape[-1], eps, True, weight_offset, form), x, residual, weight, None)


@op.kernel("triton", language="triton")
def triton_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Pair:
    return _norm(x, residual, weight, eps, weight_offset, "triton")


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_cluster(x))
def cuda_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Pair:
    return _norm(x, residual, weight, eps, weight_offset, "cuda")


CROSSOVER = Crossover("add_rms_norm", always)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`rms_norm(input + residual, …)` and that sum, in one pass over memory; by torch if their dtypes differ."""
    require_addable(input, residual)
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else None
    found = dispatch(
        CROSSOVER, (RMS_EPS if eps is None else eps, True, weight_offset, shape), input, residual, weight, None
    )
    if found is not None:
        return found
    total = input + residual
    return torch_rms_norm(total, normalized_shape, weight, eps, weight_offset), total


@op.public
def public(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Pair:
    return add_rms_norm(x, residual, x.shape[-1:], weight, eps, weight_offset=weight_offset)
