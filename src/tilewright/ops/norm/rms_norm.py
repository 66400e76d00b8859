"""RMS norm: y = x / sqrt(mean x² + eps) (offset + w), by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.norm._cases import bench_cases, check_cases, draw_weight, parameter_bytes, without_infinities
from tilewright.ops.norm._cuda import fits_cluster
from tilewright.ops.norm._operators import RMS_EPS, Norm, apply_norm, dispatch, torch_rms_norm
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.spec import Cost, Draw, Op

__all__ = ["rms_norm"]


def reference(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return torch_rms_norm(x, x.shape[-1:], weight, eps, weight_offset)


def cost(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    return Cost(read=x.nbytes + parameter_bytes(weight), written=x.nbytes, flops={"fp32": 4 * x.numel()})


def backward_cost(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Cost:
    parameters = parameter_bytes(weight)
    return Cost(read=2 * x.nbytes + parameters, written=x.nbytes + parameters, flops={"fp32": 12 * x.numel()})


def _inputs(draw: Draw) -> tuple[Tensor, Tensor | None, float, float]:
    weight, offset = draw_weight(draw)
    return without_infinities(draw, draw.randn("M", "N")), weight, 1e-6, offset


op = Op(
    "rms_norm",
    reference,
    cost,
    inputs=_inputs,
    check=check_cases(weight=("same", "none", "fp32", "offset")),
    bench=bench_cases(weight="same"),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "hidden"},
)


def _norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, form: str) -> Tensor:
    return apply_norm(Norm(x.shape[-1], eps, True, weight_offset, form), x, None, weight, None)


@op.kernel("triton", language="triton")
def triton_rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return _norm(x, weight, eps, weight_offset, "triton")


@op.kernel("cuda", language="cuda", fits=lambda x, *_: fits_cluster(x))
def cuda_rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return _norm(x, weight, eps, weight_offset, "cuda")


CROSSOVER = Crossover("rms_norm", faster_after(us=0.87, bytes_per_element=4), captured=always)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    """RMS norm, with the arguments of `torch.nn.functional.rms_norm`.

    `weight_offset` is added to the weight: 1 in Gemma models. A weight may be fp32 where the input is not.
    """
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else None
    y = dispatch(CROSSOVER, (RMS_EPS if eps is None else eps, True, weight_offset, shape), input, None, weight, None)
    return torch_rms_norm(input, normalized_shape, weight, eps, weight_offset) if y is None else y


@op.public
def public(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, eps, weight_offset=weight_offset)
