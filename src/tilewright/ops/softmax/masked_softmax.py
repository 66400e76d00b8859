"""Softmax of scaled scores over the visible keys: y = softmax(scale * x) where visible, 0 elsewhere.

Scores are [..., queries, keys]. A boolean mask is true where a key is visible; causal, a query sees the keys up to its
own position. A query that sees no key gets zeros. Hidden scores are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._exp import exp
from tilewright.ops.softmax._operators import (
    MAX_TILE,
    TILE,
    Softmax,
    SoftmaxBackward,
    gradient_formula,
    softmax_backward,
)
from tilewright.runtime.clusters import VECTOR
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Draw, Op, grid, points

__all__ = ["masked_softmax"]

MODES = ("causal", "mask", "both")


def visible(x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return which scores are visible, as a boolean tensor that broadcasts to them."""
    keep = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    keep = keep.tril() if is_causal else keep
    return keep if mask is None else keep & mask


def reference(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    keep = visible(x, mask, is_causal)
    # Filled with the smallest finite number: a row of only -inf would be NaN, and so would its gradient.
    scores = (x * scale).masked_fill(~keep, torch.finfo(x.dtype).min)
    return torch.softmax(scores, -1).masked_fill(~keep, 0.0)


def _read(x: Tensor, mask: Tensor | None, is_causal: bool) -> int:
    queries, keys = x.shape[-2:]
    seen = sum(min(q + 1, keys) for q in range(queries)) if is_causal else queries * keys
    mask_bytes = 0 if mask is None else mask.numel()
    return x.numel() // max(1, queries * keys) * seen * x.element_size() + mask_bytes


def cost(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Cost:
    flops = {"fp32": 5 * x.numel(), "special": x.numel()}
    return Cost(read=_read(x, mask, is_causal), written=x.nbytes, flops=flops)


def backward_cost(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Cost:
    return Cost(read=2 * _read(x, None, is_causal), written=x.nbytes, flops={"fp32": 5 * x.numel()})


def _inputs(draw: Draw) -> tuple[Tensor, Tensor | None, float, bool]:
    x = draw.randn("B", "H", "Q", "K", scale=3.0)
    mask = draw.randn("B", 1, 1, "K") > -0.7 if draw["mode"] != "causal" else None
    return x, mask, 0.125, draw["mode"] != "mask"


op = Op(
    "masked_softmax",
    reference,
    cost,
    inputs=_inputs,
    check=[
        *grid(B=(2,), H=(3,), Q=(1, 37), K=(45, 300), mode=MODES),
        *points(B=(1, 2, 1), H=(1, 1, 1), Q=(2, 3, 2), K=(1, 2051, 33000), mode=("both", "mask", "mask")),
    ],
    bench=points(
        B=(4, 4, 1), H=(32, 32, 32), Q=(2048, 2048, 8192), K=(2048, 2048, 8192), mode=("causal", "mask", "causal")
    ),
    backward_cost=backward_cost,
    batch="B",
    grows="Q",
)


@triton.jit
def _scores(
    x_ptr, mask_ptr, row, offs_n, inside, N, Q, H, scale, stride_b, stride_h, stride_q, stride_k,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Return the scores of these rows, -inf where hidden, and which keys are visible.

    A vector of VECTOR neighbors is loaded if one of them may be visible, since it is one access.
    """
    q = row % Q
    loaded = inside
    seen = inside
    if CAUSAL:
        loaded = inside & (offs_n // VECTOR * VECTOR <= q)
        seen = inside & (offs_n <= q)
    if HAS_MASK:
        lead = (row // Q).to(tl.int64)
        start = lead // H * stride_b + lead % H * stride_h + q.to(tl.int64) * stride_q
        seen = seen & (tl.load(mask_ptr + start + offs_n.to(tl.int64) * stride_k, mask=loaded, other=0) != 0)
    x = tl.load(x_ptr + row.to(tl.int64) * N + offs_n, mask=loaded, other=-float("inf"), eviction_policy=EVICT)
    return tl.where(seen, x.to(tl.float32) * scale, -float("inf")), seen


@triton.jit
def _masked_softmax_tile(
    x_ptr, mask_ptr, y_ptr, M, N, Q, H, scale, stride_b, stride_h, stride_q, stride_k,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) + 0 * M) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # int64 only if M is
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    inside = (row < M) & (offs_n < N)
    x, seen = _scores(
        x_ptr, mask_ptr, row, offs_n, inside, N, Q, H, scale, stride_b, stride_h, stride_q, stride_k,
        HAS_MASK, CAUSAL, VECTOR, "evict_last",
    )  # fmt: skip
    m = tl.max(x, axis=1)[:, None]
    e = exp(x - tl.where(m == -float("inf"), 0.0, m))
    total = tl.sum(e, axis=1)[:, None]
    y = tl.where(seen, e * (1.0 / total), 0.0)
    tl.store(y_ptr + row.to(tl.int64) * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _masked_softmax_online(
    x_ptr, mask_ptr, y_ptr, N, Q, H, scale, stride_b, stride_h, stride_q, stride_k,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    m = -float("inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x, _ = _scores(
            x_ptr, mask_ptr, row, offs_n, offs_n < N, N, Q, H, scale, stride_b, stride_h, stride_q, stride_k,
            HAS_MASK, CAUSAL, VECTOR, "",
        )  # fmt: skip
        new_max = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        total = total * exp(m - shift) + exp(x - shift)
        m = new_max
    scale_of_row = 1.0 / tl.sum(total, axis=0)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x, seen = _scores(
            x_ptr, mask_ptr, row, offs_n, offs_n < N, N, Q, H, scale, stride_b, stride_h, stride_q, stride_k,
            HAS_MASK, CAUSAL, VECTOR, "",
        )  # fmt: skip
        y = tl.where(seen, exp(x - m) * scale_of_row, 0.0)
        tl.store(y_ptr + row.to(tl.int64) * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)


_launch_tile = Launcher(_masked_softmax_tile)
_launch_online = Launcher(_masked_softmax_online)


@cached_plan
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: int,
    scale: float,
    is_causal: bool,
) -> PreparedLaunch:
    """Return the launch that takes scores, mask and y; `strides` are those of the mask, if there is one."""
    B, H, Q, N = shape
    M = B * H * Q
    args, vector = (N, Q, H, scale, *(strides or (0, 0, 0, 0))), VECTOR // dtype.itemsize
    flags = {"HAS_MASK": strides is not None, "CAUSAL": is_causal, "VECTOR": vector}
    if N <= MAX_TILE:
        config = TILE(device, "fwd", dtype.itemsize, next_power_of_2(N))
        return _launch_tile.prepare((cdiv(M, config["BLOCK_M"]),), M, *args, **flags, **config)
    return _launch_online.prepare((M,), *args, **flags, BLOCK_N=8192, num_warps=16)


def _like(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    return contiguous_like(x)


@operator("masked_softmax", fake=_like)
def masked_softmax_forward(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    """Masked softmax of scores [B, H, Q, K], with a mask that broadcasts to their shape."""
    y = contiguous_like(x)
    if not x.numel():
        return y
    x = x.contiguous()
    seen, strides = x, None  # without a mask the pointer is unused
    if mask is not None:
        seen = mask.expand(x.shape).view(torch.uint8)
        strides = seen.stride()
    _plan(x.shape, strides, x.dtype, x.get_device(), scale, is_causal)(x, seen, y)
    return y


def _save(ctx, inputs, output) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _backward(ctx, dy: Tensor):
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        dx = gradient_formula(y, dy, Softmax(-1)) * ctx.scale
        return dx.masked_fill(y == 0, 0.0)
    return softmax_backward(y, dy, SoftmaxBackward(-1, form="masked", scale=ctx.scale))


masked_softmax_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    return masked_softmax_forward(x, mask, scale, is_causal)


@op.also
def masked_softmax_of_long_rows(device: str) -> None:
    x = torch.empty(1, 1, 64, 65536, dtype=torch.bfloat16, device=device)
    masked_softmax_forward(x, torch.empty_like(x, dtype=torch.bool), 1.0, True)


MAX_DIMS = 4


def masked_softmax(input: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, is_causal: bool = False) -> Tensor:
    """Softmax of `scale * input` over the last dimension, restricted to visible keys.

    `mask` is boolean, true where a key is visible, and broadcasts to the input. Causal, query q also sees no key beyond
    q. A row without a visible key is zero.
    """
    if input.dim() < 2:
        raise ValueError(f"masked_softmax needs scores [..., queries, keys], got a tensor of {input.dim()} dimensions")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, true where a key is visible, not {mask.dtype}")
    if mask is not None and torch.broadcast_shapes(mask.shape, input.shape) != input.shape:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not broadcast to scores {tuple(input.shape)}")
    if input.dim() > MAX_DIMS or not eligible(input) or (mask is not None and mask.device != input.device):
        return reference(input, mask, scale, is_causal)
    if input.dim() == MAX_DIMS:
        return masked_softmax_forward(input, mask, float(scale), is_causal)
    scores = input[(None,) * (MAX_DIMS - input.dim())]
    return masked_softmax_forward(scores, mask, float(scale), is_causal).view(input.shape)


@op.public
def public(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    return masked_softmax(x, mask, scale=scale, is_causal=is_causal)
