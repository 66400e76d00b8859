"""RMS norm: y = x / sqrt(mean x² + eps) (offset + w), by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cuda import fits_a_cluster
from tilewright.ops.norm._operators import EPS, by_ours, normed, plain_rms_norm, without_infinities
from tilewright.spec import Cost, Draw, Op, grid, points


def reference(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return plain_rms_norm(x, x.shape[-1:], weight, eps, weight_offset)


def _bytes(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.nbytes


def cost(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    return Cost(read=x.nbytes + _bytes(weight), written=x.nbytes, flops={"fp32": 4 * x.numel()})


def backward_cost(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    flops = {"fp32": 12 * x.numel()}
    return Cost(read=2 * x.nbytes + _bytes(weight), written=x.nbytes + _bytes(weight), flops=flops)


def _inputs(draw: Draw) -> tuple[Tensor, Tensor | None, float, float]:
    weight = None if draw["weight"] == "none" else draw.randn("N")
    if weight is not None and draw["weight"] == "fp32":
        weight = weight.float()
    return without_infinities(draw, draw.randn("M", "N")), weight, 1e-6, 1.0 if draw["weight"] == "offset" else 0.0


op = Op(
    "rms_norm",
    reference,
    cost,
    inputs=_inputs,
    check=[
        *grid(M=(1, 37), N=(1, 781), weight=("same",)),
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
def triton_rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return normed(x, weight, None, x.shape[-1], eps, weight_offset, True, "triton")


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_a_cluster(x))
def cuda_rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return normed(x, weight, None, x.shape[-1], eps, weight_offset, True, "cuda")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.rms_norm`; a weight is added to `weight_offset` first, 1 in Gemma's models."""
    if eps is None or isinstance(eps, float):
        given = EPS if eps is None else eps
        y = by_ours(SMALLEST, input, normalized_shape, weight, None, given, weight_offset, True)
        if y is not None:
            return y
    return plain_rms_norm(input, normalized_shape, weight, eps, weight_offset)


@op.public
def public(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, eps, weight_offset=weight_offset)
