"""Intensity sweep: move the same bytes with increasing arithmetic per byte, until the kernel is compute-bound.

One multiplication is one FLOP, while the fp32 ceiling counts two per FMA, so the ceiling here is half of it.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Type checkers take a @triton.jit function for a plain one.
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.workbench.bench.intervals import of_median

if TYPE_CHECKING:
    from tilewright.timer import Timer

ELEMENTS = 2**24
TIMES = tuple(2**n for n in range(11))
BLOCK = 1024
UNROLLED = 32  # a thousand unrolled multiplications would overflow the instruction cache
SAMPLES = 30
GROWN = 1.05  # times the minimum, from which the time has grown


@triton.jit
def _multiply(x_ptr, y_ptr, up, down, K: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    for _ in range(K // STEP):
        for step in tl.static_range(STEP):
            x *= up if step % 2 == 0 else down
    tl.store(y_ptr + offs, x)


def multiply(x: Tensor, y: Tensor, k: int) -> None:
    """Multiply x k times, k a power of two, alternately by 2 and 1/2 so that values stay finite.

    The factors are arguments, because the compiler would turn constants into additions and FMAs.
    """
    _multiply[(x.numel() // BLOCK,)](x, y, 2.0, 0.5, K=k, STEP=min(k, UNROLLED), BLOCK=BLOCK, num_warps=4)


@dataclass(frozen=True)
class Point:
    k: int
    us: float
    interval_us: tuple[float, float]  # 95 % of the median
    bytes: int
    flops: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(timer: Timer, samples: int = SAMPLES, *, elements: int = ELEMENTS, device: str = "cuda") -> list[Point]:
    """Time k multiplications of every element, for each k in TIMES."""
    x = torch.randn(elements, device=device)
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], None]] = {str(k): lambda k=k: multiply(x, y, k) for k in TIMES}
    taken = timer.interleave(calls, samples)
    return [Point(k, median(taken[str(k)]), of_median(taken[str(k)]), x.nbytes + y.nbytes, k * elements) for k in TIMES]


def bend(points: Sequence[Point]) -> int | None:
    """Return the smallest k from which the time has grown, or None if it never does."""
    flat = min(points, key=lambda point: point.us)
    bends = None
    for point in reversed(points):
        if point.us < GROWN * flat.us or point.interval_us[0] <= flat.interval_us[1]:
            return bends
        bends = point.k
    return bends
