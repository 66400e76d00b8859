"""Softmax over a dimension: y = exp(x - max x) / sum exp(x - max x).

Four forms of the algorithm, each removing memory traffic of the previous one: three-pass reads the row three times and
writes it once (4N), online computes maximum and sum in one pass (3N), tile keeps the row in the registers of one
program (2N, the minimum), and cluster does the same for rows that are too long for one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.softmax._operators import (
    MAX_TILE,
    Softmax,
    SoftmaxBackward,
    dispatch,
    fits_cluster,
    gradient_formula,
    softmax_backward,
    softmax_forward,
)
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import next_power_of_2
from tilewright.spec import Cost, Op, grid, points

__all__ = ["softmax"]


def reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops={"fp32": 4 * x.numel(), "special": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops={"fp32": 4 * x.numel()})


op = Op(
    "softmax",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N", scale=3.0),),
    check=[*grid(M=(1, 3, 67), N=(1, 2, 781, 4096)), *points(M=(2, 1, 1), N=(16400, 70001, 393216))],
    bench=points(
        M=(65536, 32768, 16384, 16384, 8192, 4096, 2048, 512),
        N=(256, 1024, 4096, 8192, 32768, 65536, 131072, 262144),
    ),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "row"},
)


def _has_columns(x: Tensor) -> bool:
    return x.shape[-1] > 0


@op.kernel("manual", fits=_has_columns, origin="baseline")
def manual(x: Tensor) -> Tensor:
    """Written out in PyTorch: five kernels, each with a round trip through memory."""
    shifted = x.float() - x.float().amax(dim=-1, keepdim=True)
    e = torch.exp(shifted)
    return (e / e.sum(dim=-1, keepdim=True)).to(x.dtype)


@triton.jit
def _softmax_three_pass(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: M * N may exceed 2**31
    x_ptr += row * N
    y_ptr += row * N
    largest = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        largest = tl.maximum(largest, tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32))
    m = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        total += tl.exp(x - m)
    scale = 1.0 / tl.sum(total, axis=0)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + offs_n, (tl.exp(x - m) * scale).to(y_ptr.dtype.element_ty), mask=offs_n < N)


_launch_three_pass = Launcher(_softmax_three_pass)


@cached_plan
def _plan_three_pass(M: int, N: int, dtype: torch.dtype, device: int) -> PreparedLaunch:
    block, warps = (4096, 8) if N <= 8192 else (8192, 16)
    return _launch_three_pass.prepare((M,), N, BLOCK_N=min(block, next_power_of_2(N)), num_warps=warps)


@operator("softmax_three_pass", fake=contiguous_like)
def three_pass_forward(x: Tensor) -> Tensor:
    """Softmax over the last dimension, reading it three times."""
    y = contiguous_like(x)
    N = x.shape[-1]
    if x.numel():
        _plan_three_pass(x.numel() // N, N, x.dtype, x.get_device())(x.contiguous(), y)
    return y


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _backward(ctx, dy: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():
        return gradient_formula(y, dy, Softmax(-1))
    return softmax_backward(y, dy, SoftmaxBackward(-1, form="online"))


three_pass_forward.differentiate(_save, _backward)


@op.kernel("triton-three-pass", language="triton", fits=_has_columns)
def three_pass(x: Tensor) -> Tensor:
    return three_pass_forward(x)


@op.kernel("triton-online", language="triton", fits=_has_columns)
def online(x: Tensor) -> Tensor:
    return softmax_forward(x, Softmax(-1, form="online"))


@op.kernel("triton", language="triton", fits=lambda x: 0 < x.shape[-1] <= MAX_TILE)
def tile(x: Tensor) -> Tensor:
    return softmax_forward(x, Softmax(-1, form="tile"))


@op.kernel("cuda", language="cuda", fits=lambda x: _has_columns(x) and fits_cluster(x))
def cluster(x: Tensor) -> Tensor:
    return softmax_forward(x, Softmax(-1, form="cluster"))


@op.also
def softmax_over_a_middle_dimension_too_long_for_clusters(device: str) -> None:
    y = softmax_forward(torch.empty(2, 2**18, 64, dtype=torch.bfloat16, device=device), Softmax(1))
    softmax_backward(y, y, SoftmaxBackward(1))


CROSSOVER = Crossover("softmax", faster_after(us=1.75, bytes_per_element=4), captured=always)


def softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over a dimension, with the arguments of `torch.nn.functional.softmax`."""
    same_dtype = dtype is None or dtype == getattr(input, "dtype", None)
    y = dispatch(CROSSOVER, (dim, False), input) if same_dtype and type(dim) is int else None
    return torch.nn.functional.softmax(input, dim=dim, dtype=dtype) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return softmax(x, -1)


op.over(torch.softmax, softmax, (0, 1))
