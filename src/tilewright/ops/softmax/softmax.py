"""Softmax over a dimension: y = exp(x - max x) / sum exp(x - max x).

Forms of one algorithm, in the order in which each removes what the one before it wastes. Counted in moves of the row
through memory: three-pass reads it three times and writes it once (4N), online finds maximum and sum together (3N),
the tile form keeps the row in the registers of one program (2N, the least), and the cluster form does so for rows that
are longer than one program can hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.softmax._operators import (
    LONGEST_TILE,
    fits_a_cluster,
    gradient_formula,
    softmax_backward,
    softmax_forward,
    softmaxed,
)
from tilewright.runtime.configs import planned
from tilewright.runtime.launch import Launcher, Prepared
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import next_power_of_2
from tilewright.spec import Cost, Op, grid, points


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
)


def _has_columns(x: Tensor) -> bool:
    return x.shape[-1] > 0


@op.kernel("manual", fits=_has_columns, is_baseline=True)
def manual(x: Tensor) -> Tensor:
    """Written out in PyTorch: five kernels, each through memory."""
    shifted = x.float() - x.float().amax(dim=-1, keepdim=True)
    e = torch.exp(shifted)
    return (e / e.sum(dim=-1, keepdim=True)).to(x.dtype)


@triton.jit
def _softmax_three_pass(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: M * N may pass 2**31
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


@planned
def _plan_three_pass(M: int, N: int, dtype: torch.dtype, device: int) -> Prepared:
    block, warps = (4096, 8) if N <= 8192 else (8192, 16)
    return _launch_three_pass.prepare((M,), N, BLOCK_N=min(block, next_power_of_2(N)), num_warps=warps)


@operator("softmax_three_pass", fake=contiguous_like)
def three_pass_forward(x: Tensor) -> Tensor:
    """Softmax of the last dimension, reading it three times."""
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
        return gradient_formula(y, dy, -1, log=False)
    return softmax_backward(y, dy, -1, False, 1.0, "online")


three_pass_forward.differentiate(_save, _backward)


@op.kernel("triton-three-pass", language="triton", fits=_has_columns)
def three_pass(x: Tensor) -> Tensor:
    return three_pass_forward(x)


@op.kernel("triton-online", language="triton", fits=_has_columns)
def online(x: Tensor) -> Tensor:
    return softmax_forward(x, -1, False, "online")


@op.kernel("triton", language="triton", fits=lambda x: 0 < x.shape[-1] <= LONGEST_TILE)
def tile(x: Tensor) -> Tensor:
    return softmax_forward(x, -1, False, "tile")


@op.kernel("cuda", language="cuda", fits=lambda x: _has_columns(x) and fits_a_cluster(x))
def cluster(x: Tensor) -> Tensor:
    return softmax_forward(x, -1, False, "cluster")


@op.also
def of_columns(device: str) -> None:
    y = softmax_forward(torch.empty(64, 4096, 256, dtype=torch.bfloat16, device=device), 1, False, "best")
    softmax_backward(y, y, 1, False, 1.0, "best")


SMALLEST = 2**21  # elements; below this torch takes less time than our call costs the host


def softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.nn.functional.softmax`: the fast kernels where they fit and win, torch elsewhere."""
    y = softmaxed(SMALLEST, input, dim, dtype, False)
    return torch.nn.functional.softmax(input, dim=dim, dtype=dtype) if y is None else y


@op.public
def public(x: Tensor) -> Tensor:
    return softmax(x, -1)
