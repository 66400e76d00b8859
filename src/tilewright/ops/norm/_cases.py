"""Cases and inputs that the four norms share."""

from __future__ import annotations

import math

from torch import Tensor

from tilewright.spec import Case, Draw, grid, points


def check_cases(**modes: tuple[str, ...]) -> list[Case]:
    """Return the cases to check of an Op with one mode: its usual value first, then the others at small sizes."""
    ((name, (usual, *others)),) = modes.items()
    small = {"M": (5, 3, 7, 3, 3), "N": (1024, 61, 96, 7, 31)}
    count = 1 + len(others)
    return [
        *grid(M=(1, 37), N=(1, 781), **{name: (usual,)}),
        *points(**{size: values[:count] for size, values in small.items()}, **{name: (usual, *others)}),
        *points(M=(300, 3, 2, 2), N=(40, 5000, 9000, 33000), **{name: (usual,) * 4}),
    ]


def bench_cases(**mode: str) -> list[Case]:
    """Return the cases to time, with the usual value of the Op's mode."""
    sizes = {"M": (32768, 32768, 16384, 16384, 8192, 4096), "N": (1024, 2048, 4096, 8192, 16384, 32768)}
    return points(**sizes, **{name: (value,) * 6 for name, value in mode.items()})


def parameter_bytes(*parameters: Tensor | None) -> int:
    return sum(p.nbytes for p in parameters if p is not None)


def draw_weight(draw: Draw) -> tuple[Tensor | None, float]:
    """Return the weight of an rms_norm and its offset, by the case's mode `weight`."""
    mode = draw["weight"]
    weight = None if mode == "none" else draw.randn("N")
    weight = weight.float() if weight is not None and mode == "fp32" else weight
    return weight, 1.0 if mode == "offset" else 0.0


def draw_affine(draw: Draw) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a layer_norm, by the case's mode `affine`."""
    mode = draw["affine"]
    weight = draw.randn("N") if mode in ("same", "fp32", "weight") else None
    bias = draw.randn("N") if mode in ("same", "fp32", "bias") else None
    if mode == "fp32" and weight is not None and bias is not None:
        return weight.float(), bias.float()
    return weight, bias


def without_infinities(draw: Draw, x: Tensor) -> Tensor:
    """Return x with NaN for infinities, for rms_norm.

    With an infinity torch itself returns zeros and one NaN on a CPU, and on a GPU that or a row of NaN, depending on
    columns and dtype.
    """
    return x.masked_fill(x.isinf(), math.nan) if draw.values == "special" else x
