"""Layer norm: y = (x - mean x) / sqrt(var x + eps) w + b, by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cuda import fits_a_cluster
from tilewright.ops.norm._operators import by_ours, normed, plain_layer_norm
from tilewright.spec import Cost, Draw, Op, grid, points

EPS = 1e-5  # torch's own


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return plain_layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _bytes(*weights: Tensor | None) -> int:
    return sum(w.nbytes for w in weights if w is not None)


def cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    return Cost(read=x.nbytes + _bytes(weight, bias), written=x.nbytes, flops={"fp32": 6 * x.numel()})


def backward_cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    flops = {"fp32": 16 * x.numel()}
    return Cost(read=2 * x.nbytes + _bytes(weight), written=x.nbytes + _bytes(weight, bias), flops=flops)


def _inputs(draw: Draw) -> tuple[Tensor, Tensor | None, Tensor | None]:
    kind = draw["affine"]
    weight = draw.randn("N") if kind in ("same", "fp32", "weight") else None
    bias = draw.randn("N") if kind in ("same", "fp32", "bias") else None
    if kind == "fp32" and weight is not None and bias is not None:
        weight, bias = weight.float(), bias.float()
    return draw.randn("M", "N"), weight, bias


op = Op(
    "layer_norm",
    reference,
    cost,
    inputs=_inputs,
    check=[
        *grid(M=(1, 37), N=(1, 781), affine=("same",)),
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
def triton_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return normed(x, weight, bias, x.shape[-1], EPS, 0.0, False, "triton")


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_a_cluster(x))
def cuda_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return normed(x, weight, bias, x.shape[-1], EPS, 0.0, False, "cuda")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """As `torch.nn.functional.layer_norm`; weight and bias may be fp32 where the input is not."""
    if isinstance(eps, float):
        y = by_ours(SMALLEST, input, normalized_shape, weight, bias, eps, 0.0, False)
        if y is not None:
            return y
    return plain_layer_norm(input, normalized_shape, weight, bias, eps)


@op.public
def public(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return layer_norm(x, x.shape[-1:], weight, bias)
