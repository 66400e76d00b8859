"""Residual add and layer norm: s = x + residual; y = (s - mean s) / sqrt(var s + eps) w + b, by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cases import bench_cases, check_cases, draw_affine, parameter_bytes
from tilewright.ops.norm._cuda import fits_cluster
from tilewright.ops.norm._operators import Norm, apply_norm, dispatch, require_addable, torch_layer_norm
from tilewright.runtime.crossovers import Crossover, always
from tilewright.spec import Cost, Op

__all__ = ["add_layer_norm"]

EPS = 1e-5  # the default of torch's layer_norm
Pair = tuple[Tensor, Tensor]  # the norm and the sum


def reference(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Pair:
    total = x + residual
    return torch_layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def cost(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    return Cost(2 * x.nbytes + parameter_bytes(weight, bias), 2 * x.nbytes, flops={"fp32": 7 * x.numel()})


def backward_cost(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    """Both inputs have the same gradient, which is written once."""
    read, written = 3 * x.nbytes + parameter_bytes(weight), x.nbytes + parameter_bytes(weight, bias)
    return Cost(read, written, flops={"fp32": 17 * x.numel()})


op = Op(
    "add_layer_norm",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"), draw.randn("M", "N"), *draw_affine(draw)),
    check=check_cases(affine=("same", "none", "fp32", "weight", "bias")),
    bench=bench_cases(affine="same"),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "hidden"},
)


@op.kernel("triton", language="triton")
def triton_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Pair:
    return apply_norm(Norm(x.shape[-1], EPS, False, form="triton"), x, residual, weight, bias)


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_cluster(x))
def cuda_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Pair:
    return apply_norm(Norm(x.shape[-1], EPS, False, form="cuda"), x, residual, weight, bias)


CROSSOVER = Crossover("add_layer_norm", always)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """`layer_norm(input + residual, …)` and that sum, in one pass over memory; by torch if their dtypes differ."""
    require_addable(input, residual)
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else None
    found = dispatch(CROSSOVER, (eps, False, 0.0, shape), input, residual, weight, bias)
    if found is not None:
        return found
    total = input + residual
    return torch_layer_norm(total, normalized_shape, weight, bias, eps), total


@op.public
def public(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Pair:
    return add_layer_norm(x, residual, x.shape[-1:], weight, bias)
