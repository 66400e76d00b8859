"""Layer norm: y = (x - mean x) / sqrt(var x + eps) w + b, by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cases import bench_cases, check_cases, draw_affine, parameter_bytes
from tilewright.ops.norm._cuda import fits_cluster
from tilewright.ops.norm._operators import Norm, apply_norm, dispatch, torch_layer_norm
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.spec import Cost, Op

__all__ = ["layer_norm"]

EPS = 1e-5  # torch's default


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch_layer_norm(x, x.shape[-1:], weight, bias, EPS)


def cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    return Cost(read=x.nbytes + parameter_bytes(weight, bias), written=x.nbytes, flops={"fp32": 6 * x.numel()})


def backward_cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    read, written = 2 * x.nbytes + parameter_bytes(weight), x.nbytes + parameter_bytes(weight, bias)
    return Cost(read, written, flops={"fp32": 16 * x.numel()})


op = Op(
    "layer_norm",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"), *draw_affine(draw)),
    check=check_cases(affine=("same", "none", "fp32", "weight", "bias")),
    bench=bench_cases(affine="same"),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "hidden"},
)


@op.kernel("triton", language="triton")
def triton_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return apply_norm(Norm(x.shape[-1], EPS, False, form="triton"), x, None, weight, bias)


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_cluster(x))
def cuda_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return apply_norm(Norm(x.shape[-1], EPS, False, form="cuda"), x, None, weight, bias)


CROSSOVER = Crossover("layer_norm", faster_after(us=0.87, bytes_per_element=4), captured=always)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Layer norm, with the arguments of `torch.nn.functional.layer_norm`.

    Weight and bias may be fp32 where the input is not.
    """
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else None
    y = dispatch(CROSSOVER, (eps, False, 0.0, shape), input, None, weight, bias)
    return torch_layer_norm(input, normalized_shape, weight, bias, eps) if y is None else y


@op.public
def public(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return layer_norm(x, x.shape[-1:], weight, bias)
