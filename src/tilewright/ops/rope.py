"""Rotary embedding: every pair of a head's elements is turned by an angle that its position and the pair decide.

(a, b) becomes (a cos - b sin, b cos + a sin). A pair is (x[i], x[i + R]) or, interleaved, (x[2i], x[2i + 1]), i < R;
what a head holds beyond 2R is left as it is. The gradient is turned back: the same kernel with -sin.

Queries and keys go in one launch. A program takes some heads of one token, so that the angles are read once for them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.configs import ConfigTable, cached_plan
from tilewright.runtime.elementwise import can_write_in_place
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Case, Cost, Draw, Op, points

BASE = 10000.0


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    R = cos.shape[-1]
    rest = x[..., 2 * R :]
    if interleaved:
        a, b = x[..., : 2 * R : 2], x[..., 1 : 2 * R : 2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x[..., :R], x[..., R : 2 * R]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    where = slice(q.shape[1]) if positions is None else positions
    cos, sin = cos[where].unsqueeze(-2), sin[where].unsqueeze(-2)  # [..., S, 1, R]
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Cost:
    both = q.nbytes + k.nbytes
    pairs = cos.shape[-1] * (q.numel() + k.numel()) // max(1, q.shape[-1])
    tables = cos.nbytes + sin.nbytes + (0 if positions is None else positions.nbytes)
    return Cost(read=both + tables, written=both, flops={"fp32": 6 * pairs})


def _takes(case: Case) -> bool:
    return 0 < 2 * case["R"] <= case["D"] and case["S"] > 0  # type: ignore[operator]


def _inputs(draw: Draw) -> tuple[Any, ...]:
    q, k = draw.randn("B", "S", "H", "D"), draw.randn("B", "S", "K", "D")
    steps = torch.arange(draw["S"], device=draw.device)[:, None] * torch.ones(draw["R"], device=draw.device)
    angles = steps * BASE ** (-torch.arange(draw["R"], device=draw.device) / draw["R"])
    tables = [angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)]
    return q, k, *tables, draw.randint("B", "S", high="S") if draw["positions"] else None, draw["interleaved"]


op = Op(
    "rope",
    reference,
    cost,
    inputs=_inputs,
    check=points(
        B=(1, 2, 2, 1, 2, 1),
        S=(1, 5, 7, 33, 3, 2),
        H=(1, 4, 3, 9, 2, 40),
        K=(1, 2, 1, 0, 2, 8),
        D=(2, 16, 25, 64, 24, 128),
        R=(1, 8, 12, 16, 5, 64),
        interleaved=(False, True, False, True, True, False),
        positions=(False, True, False, False, True, True),
    ),
    bench=points(
        B=(4, 4, 4),
        S=(4096, 4096, 4096),
        H=(32, 32, 32),
        K=(8, 8, 8),
        D=(128, 128, 128),
        R=(64, 64, 32),
        interleaved=(False, True, False),
        positions=(False, False, True),
    ),
    backward_cost=cost,
    constants=(2, 3),
    takes=_takes,
    batch="B",
    grows="S",
)


@triton.jit
def _turn_heads(
    x_ptr,
    y_ptr,
    stride_xh,
    stride_yh,
    start,
    H,
    cos,
    sin,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Some heads of one token, from `start` on."""
    offs_h = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    x_ptrs, y_ptrs = x_ptr + offs_h * stride_xh, y_ptr + offs_h * stride_yh
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_R)[None, :]
        mask = (offs_h < H) & (offs < 2 * R)
        x = tl.load(x_ptrs + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_R, 2)))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_H, 2 * BLOCK_R))
        tl.store(y_ptrs + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        offs = tl.arange(0, BLOCK_R)[None, :]
        mask = (offs_h < H) & (offs < R)
        a = tl.load(x_ptrs + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        b = tl.load(x_ptrs + R + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptrs + offs, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptrs + R + offs, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if COPIES:
        offs = 2 * R + tl.arange(0, BLOCK_REST)[None, :]
        mask = (offs_h < H) & (offs < D)
        tl.store(y_ptrs + offs, tl.load(x_ptrs + offs, mask=mask, eviction_policy="evict_last"), mask=mask)


@triton.jit
def _rope_fwd(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_qob,
    stride_qos,
    stride_qoh,
    stride_kob,
    stride_kos,
    stride_koh,
    stride_pb,
    stride_ps,
    S,
    H,
    K,
    T,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    across = tl.cdiv(H, BLOCK_H) + tl.cdiv(K, BLOCK_H)  # programs of a token lie side by side, as its heads may
    token, part = tl.program_id(0) // across, tl.program_id(0) % across
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    position = s
    if positions_ptr is not None:
        position = tl.load(positions_ptr + b * stride_pb + s * stride_ps).to(tl.int64)
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    known = (offs_r < R) & (position >= 0) & (position < T)  # beyond the tables there is no angle
    cos = tl.load(cos_ptr + position * R + offs_r, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + position * R + offs_r, mask=known, other=float("nan")).to(tl.float32)
    if INVERSE:
        sin = -sin
    if part < tl.cdiv(H, BLOCK_H):
        x, y = q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + b * stride_qob + s * stride_qos
        start = part * BLOCK_H
        _turn_heads(
            x, y, stride_qh, stride_qoh, start, H, cos, sin, D, R, INTERLEAVED, COPIES, BLOCK_H, BLOCK_R, BLOCK_REST
        )
    else:
        x, y = k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + b * stride_kob + s * stride_kos
        start = (part - tl.cdiv(H, BLOCK_H)) * BLOCK_H
        _turn_heads(
            x, y, stride_kh, stride_koh, start, K, cos, sin, D, R, INTERLEAVED, COPIES, BLOCK_H, BLOCK_R, BLOCK_REST
        )


def _default(D: int, R: int, size: int, *_: object) -> dict[str, int]:
    # 16 bytes a thread; then the angles are read in the layout they are used in, without shared memory.
    return {"heads": max(1, 2048 // size // next_power_of_2(R)), "num_warps": 4}


def _choices(*_: object) -> list[dict[str, int]]:
    return [{"heads": heads, "num_warps": warps} for heads in (4, 8, 16, 32) for warps in (1, 2, 4)]


CONFIG = ConfigTable("rope.json", _default, _choices)
_launch = Launcher(_rope_fwd)


@cached_plan
def _plan(
    of_q: tuple[int, ...],
    of_k: tuple[int, ...],
    of_tables: tuple[int, int],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype | None, ...],
    device: int,
    interleaved: bool,
    inverse: bool,
    inplace: bool,
) -> Callable[..., None]:
    """How q and k are turned. Strides are those of q, k, the results and, of two dimensions, the positions."""
    (B, S, H, D), K, (T, R) = of_q, of_k[2], of_tables
    config = CONFIG(device, D, R, dtypes[0].itemsize, "pairs" if interleaved else "halves")  # type: ignore[union-attr]
    heads = min(config["heads"], next_power_of_2(max(1, H, K)))
    grid = (B * S * (cdiv(H, heads) + cdiv(K, heads)),)
    if not grid[0]:
        return lambda *_: None
    return _launch.prepare(
        grid,
        *chain.from_iterable(stride[:3] for stride in strides),
        S,
        H,
        K,
        T,
        D=D,
        R=R,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        COPIES=D > 2 * R and not inplace,
        BLOCK_H=heads,
        BLOCK_R=next_power_of_2(R),
        BLOCK_REST=next_power_of_2(max(1, D - 2 * R)),
        num_warps=config["num_warps"],
    )


def _rotate(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    interleaved: bool,
    inverse: bool,
) -> None:
    q, k, cos, sin, positions = inputs
    q_out, k_out = outputs
    placed, kind = (0, 0), None
    if positions is not None:
        placed, kind = positions.stride() if positions.dim() == 2 else (0, *positions.stride()), positions.dtype
    strides = q.stride(), k.stride(), q_out.stride(), k_out.stride(), placed
    dtypes = q.dtype, k.dtype, cos.dtype, sin.dtype, kind
    plan = _plan(q.shape, k.shape, cos.shape, strides, dtypes, q.get_device(), interleaved, inverse, q_out is q)
    plan(q, k, cos.contiguous(), sin.contiguous(), positions, q_out, k_out)


def _side_by_side(x: Tensor) -> Tensor:
    """A head's elements next to each other; the other dimensions as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fresh(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_side_by_side(q)), torch.empty_like(_side_by_side(k))


@operator("rope", fake=_fresh)
def rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, D] and k [B, S, K, D] turned, or turned back."""
    outputs = _fresh(q, k)
    _rotate((_side_by_side(q), _side_by_side(k), cos, sin, positions), outputs, interleaved, inverse)
    return outputs


def _save(ctx, inputs, output) -> None:
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx, dq: Tensor, dk: Tensor):
    dq, dk = rotated(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return *(g if needs else None for g, needs in zip((dq, dk), ctx.needs_input_grad, strict=False)), *[None] * 5


rotated.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return rotated(q, k, cos, sin, positions, interleaved, False)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Queries and keys with rotary embedding.

    q is [B, S, heads, D] or, with seq_dim=2, [B, heads, S, D], in any layout; k has its own number of heads or is None.
    cos and sin [T, R] hold the angles of T positions, and get no gradient. The first 2R elements of a head are turned,
    in pairs (i, i + R) or, interleaved, (2i, 2i + 1). positions [S] or [B, S], below T, say where tokens stand; without
    them they stand in order. With inplace=True q and k themselves are changed.
    """
    _require(q, k, cos, sin, positions, seq_dim)
    if cos.requires_grad or sin.requires_grad:
        cos, sin = cos.detach(), sin.detach()
    x = q.transpose(1, 2) if seq_dim == 2 else q  # [B, S, heads, D]
    y = x[:, :, :0] if k is None else k.transpose(1, 2) if seq_dim == 2 else k
    fits = _fits(x, y, cos, sin, positions)
    if fits and inplace and x.stride(-1) == y.stride(-1) == 1 and can_write_in_place(x, y):
        _rotate((x, y, cos, sin, positions), (x, y), interleaved, False)
        torch.autograd.graph.increment_version([x, y])
        return q, k
    if fits:
        turned = rotated(x, y, cos, sin, positions, interleaved, False)
    else:
        turned = reference(x, y, cos, sin, positions, interleaved)
    if inplace:
        x.copy_(turned[0])
        y.copy_(turned[1])
        return q, k
    new_q, new_k = turned
    if seq_dim == 2:
        new_q, new_k = new_q.transpose(1, 2), new_k.transpose(1, 2)
    return new_q, None if k is None else new_k


@op.public
def public(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    return rope(q, k, cos, sin, positions, interleaved=interleaved)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> bool:
    if torch.compiler.is_compiling():  # Inductor fuses torch's own with its neighbours
        return False
    if positions is not None and positions.device != q.device:
        return False
    if cos.dtype == q.dtype:
        return eligible(q, k, cos, sin)
    return eligible(q, k) and eligible(cos, sin) and cos.device == q.device


def _require(q: Any, k: Any, cos: Any, sin: Any, positions: Any, seq_dim: int) -> None:
    """Raise where these do not go together."""
    if seq_dim not in (1, 2):
        raise ValueError(f"seq_dim is 1 for [B, S, heads, D] or 2 for [B, heads, S, D], not {seq_dim!r}")
    for name, value in (("q", q), ("cos", cos), ("sin", sin)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a tensor, not {type(value).__name__}")
    if q.dim() != 4 or (k is not None and k.dim() != 4):
        raise ValueError("q and k have four dimensions")
    of_q, tables = q.shape, cos.shape
    B, S, D = of_q[0], of_q[seq_dim], of_q[3]
    if k is not None:
        of_k = k.shape
        if of_k[0] != B or of_k[seq_dim] != S or of_k[3] != D:
            raise ValueError(f"q and k differ in more than their heads: {[*of_q]} and {[*of_k]}")
    if len(tables) != 2 or tables != sin.shape or not 0 < 2 * tables[1] <= D:
        raise ValueError(f"cos and sin are [positions, pairs], at most {D // 2} pairs, not {[*tables]}, {[*sin.shape]}")
    if positions is None and tables[0] < S:
        raise ValueError(f"cos and sin hold {tables[0]} positions, and there are {S} tokens")
    if positions is not None and (positions.is_floating_point() or positions.shape not in ((S,), (B, S))):
        raise ValueError(
            f"positions are whole numbers, [{S}] or [{B}, {S}], not {positions.dtype} {[*positions.shape]}"
        )
