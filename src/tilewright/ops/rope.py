"""Rotary embedding: each pair of a head's elements is rotated by an angle that depends on position and pair.

(a, b) becomes (a cos - b sin, b cos + a sin). A pair is (x[i], x[i + R]) or, interleaved, (x[2i], x[2i + 1]), i < R;
elements from 2R on are unchanged. The gradient is the inverse rotation: the same kernel with -sin.

One launch rotates queries and keys. A program takes several heads of one token, so that they share its angles.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.elementwise import can_write_in_place
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Case, Cost, Draw, Op, points

__all__ = ["rope"]

BASE = 10000.0


def _rotate_in_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    R = cos.shape[-1]
    rest = x[..., 2 * R :]
    if interleaved:
        a, b = x[..., : 2 * R : 2], x[..., 1 : 2 * R : 2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x[..., :R], x[..., R : 2 * R]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    where = slice(q.shape[1]) if positions is None else positions
    cos, sin = cos[where].unsqueeze(-2), sin[where].unsqueeze(-2)  # [..., S, 1, R]
    return _rotate_in_torch(q, cos, sin, interleaved), _rotate_in_torch(k, cos, sin, interleaved)


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Cost:
    both = q.nbytes + k.nbytes
    pairs = cos.shape[-1] * (q.numel() + k.numel()) // max(1, q.shape[-1])
    tables = cos.nbytes + sin.nbytes + (0 if positions is None else positions.nbytes)
    return Cost(read=both + tables, written=both, flops={"fp32": 6 * pairs})


def _is_valid(case: Case) -> bool:
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
    takes=_is_valid,
    batch="B",
    grows="S",
)


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, stride_xh, stride_yh, start, H, cos, sin,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_H heads of one token, from `start` on."""
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
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr, stride_qb, stride_qs, stride_qh, stride_kb,
    stride_ks, stride_kh, stride_qob, stride_qos, stride_qoh, stride_kob, stride_kos, stride_koh, stride_pb,
    stride_ps, S, H, K, T,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, COPIES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # Neighboring programs take heads of one token, which may be neighbors in memory.
    programs = tl.cdiv(H, BLOCK_H) + tl.cdiv(K, BLOCK_H)  # per token
    token, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    position = s
    if positions_ptr is not None:
        position = tl.load(positions_ptr + b * stride_pb + s * stride_ps).to(tl.int64)
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    has_angle = (offs_r < R) & (position >= 0) & (position < T)  # NaN outside of the tables
    cos = tl.load(cos_ptr + position * R + offs_r, mask=has_angle, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + position * R + offs_r, mask=has_angle, other=float("nan")).to(tl.float32)
    if INVERSE:
        sin = -sin
    if part < tl.cdiv(H, BLOCK_H):
        x, y = q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + b * stride_qob + s * stride_qos
        start = part * BLOCK_H
        _rotate_heads(
            x, y, stride_qh, stride_qoh, start, H, cos, sin, D, R, INTERLEAVED, COPIES, BLOCK_H, BLOCK_R, BLOCK_REST
        )
    else:
        x, y = k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + b * stride_kob + s * stride_kos
        start = (part - tl.cdiv(H, BLOCK_H)) * BLOCK_H
        _rotate_heads(
            x, y, stride_kh, stride_koh, start, K, cos, sin, D, R, INTERLEAVED, COPIES, BLOCK_H, BLOCK_R, BLOCK_REST
        )


def _default(D: int, R: int, size: int, *_: object) -> Config:
    # 16 bytes per thread: the angles are then loaded in the layout of the heads, without shared memory.
    return {"heads": max(1, 2048 // size // next_power_of_2(R)), "num_warps": 4}


def _choices(*_: object) -> list[Config]:
    return [{"heads": heads, "num_warps": warps} for heads in (4, 8, 16, 32) for warps in (1, 2, 4)]


CONFIG = ConfigTable("rope.json", _default, _choices)
_launch = Launcher(_rope_fwd)


class Rope(NamedTuple):
    """The options of a call."""

    interleaved: bool
    inverse: bool = False


@cached_plan
def _plan(
    options: Rope,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype | None, ...],
    device: int,
    inplace: bool,
) -> Callable[..., None]:
    """Return the launch that takes q, k, cos, sin, positions and the results.

    The shapes are those of q, k and the tables, the strides those of q, k, the results and the positions [B, S].
    """
    (B, S, H, D), (_, _, K, _), (T, R) = shapes
    pairs = "pairs" if options.interleaved else "halves"
    config = CONFIG(device, D, R, dtypes[0].itemsize, pairs)  # type: ignore[union-attr]
    heads = min(config["heads"], next_power_of_2(max(1, H, K)))
    grid = (B * S * (cdiv(H, heads) + cdiv(K, heads)),)
    if not grid[0]:
        return lambda *_: None
    return _launch.prepare(
        grid,
        *chain.from_iterable(stride[:3] for stride in strides), S, H, K, T,
        D=D, R=R, INTERLEAVED=options.interleaved, INVERSE=options.inverse, COPIES=D > 2 * R and not inplace,
        BLOCK_H=heads, BLOCK_R=next_power_of_2(R), BLOCK_REST=next_power_of_2(max(1, D - 2 * R)),
        num_warps=config["num_warps"],
    )  # fmt: skip


def _rotate(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    options: Rope,
) -> None:
    q, k, cos, sin, positions = inputs
    q_out, k_out = outputs
    position_strides, position_dtype = (0, 0), None
    if positions is not None:
        position_strides, position_dtype = (0, *positions.stride())[-2:], positions.dtype
    strides = q.stride(), k.stride(), q_out.stride(), k_out.stride(), position_strides
    dtypes = q.dtype, k.dtype, cos.dtype, sin.dtype, position_dtype
    plan = _plan(options, (q.shape, k.shape, cos.shape), strides, dtypes, q.get_device(), q_out is q)
    plan(q, k, cos.contiguous(), sin.contiguous(), positions, q_out, k_out)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """Return x with the elements of a head contiguous; a copy only where needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_outputs(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_with_contiguous_heads(q)), torch.empty_like(_with_contiguous_heads(k))


@operator("rope", fake=_empty_outputs)
def rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Rope
) -> tuple[Tensor, Tensor]:
    """The rotation of q [B, S, H, D] and k [B, S, K, D], or its inverse."""
    outputs = _empty_outputs(q, k)
    _rotate((_with_contiguous_heads(q), _with_contiguous_heads(k), cos, sin, positions), outputs, options)
    return outputs


def _save(ctx, inputs, output) -> None:
    _, _, *tables, ctx.options = inputs
    ctx.save_for_backward(*tables)


def _backward(ctx, dq: Tensor, dk: Tensor):
    interleaved, inverse = ctx.options
    dq, dk = rope_forward(dq, dk, *ctx.saved_tensors, Rope(interleaved, not inverse))
    return dq if ctx.needs_input_grad[0] else None, dk if ctx.needs_input_grad[1] else None


rope_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return rope_forward(q, k, cos, sin, positions, Rope(interleaved))


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
    """Rotary embedding of queries and keys.

    q is [B, S, heads, D] or, with seq_dim=2, [B, heads, S, D], with any strides; k may have another number of heads, or
    be None. cos and sin [T, R] hold the angles of T positions, and get no gradient. The first 2R elements of a head are
    rotated, in pairs (i, i + R) or, interleaved, (2i, 2i + 1). positions [S] or [B, S], below T, are those of the
    tokens; the default is 0, 1, 2, …. With inplace=True q and k themselves are changed.
    """
    _validate(q, k, cos, sin, positions, seq_dim)
    if cos.requires_grad or sin.requires_grad:
        cos, sin = cos.detach(), sin.detach()
    x = q.transpose(1, 2) if seq_dim == 2 else q  # [B, S, heads, D]
    y = x[:, :, :0] if k is None else k.transpose(1, 2) if seq_dim == 2 else k
    options, is_eligible = Rope(interleaved), _is_eligible(x, y, cos, sin, positions)
    if is_eligible and inplace and x.stride(-1) == y.stride(-1) == 1 and can_write_in_place(x, y):
        _rotate((x, y, cos, sin, positions), (x, y), options)
        torch.autograd.graph.increment_version([x, y])
        return q, k
    if is_eligible:
        new_q, new_k = rope_forward(x, y, cos, sin, positions, options)
    else:
        new_q, new_k = reference(x, y, cos, sin, positions, interleaved)
    if inplace:
        x.copy_(new_q)
        y.copy_(new_k)
        return q, k
    if seq_dim == 2:
        new_q, new_k = new_q.transpose(1, 2), new_k.transpose(1, 2)
    return new_q, None if k is None else new_k


@op.public
def public(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    return rope(q, k, cos, sin, positions, interleaved=interleaved)


def _is_eligible(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> bool:
    if torch.compiler.is_compiling():  # Inductor fuses the reference with its neighbors
        return False
    if positions is not None and positions.device != q.device:
        return False
    if cos.dtype == q.dtype:
        return eligible(q, k, cos, sin)
    return eligible(q, k) and eligible(cos, sin) and cos.device == q.device


def _validate(q: Any, k: Any, cos: Any, sin: Any, positions: Any, seq_dim: int) -> None:
    """Raise where the arguments do not match."""
    if seq_dim not in (1, 2):
        raise ValueError(f"seq_dim must be 1 for [B, S, heads, D] or 2 for [B, heads, S, D], not {seq_dim!r}")
    for name, value in (("q", q), ("cos", cos), ("sin", sin)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if q.dim() != 4 or (k is not None and k.dim() != 4):
        raise ValueError("q and k must have four dimensions")
    tables, (B, _, _, D), S = cos.shape, q.shape, q.shape[seq_dim]
    if k is not None and (k.shape[0], k.shape[seq_dim], k.shape[3]) != (B, S, D):
        raise ValueError(f"q and k may differ in the number of heads only, not {[*q.shape]} and {[*k.shape]}")
    if len(tables) != 2 or tables != sin.shape or not 0 < 2 * tables[1] <= D:
        raise ValueError(f"cos and sin must be [positions, at most {D // 2} pairs], not {[*tables]} and {[*sin.shape]}")
    if positions is None and tables[0] < S:
        raise ValueError(f"cos and sin have {tables[0]} positions, fewer than the {S} tokens")
    if positions is not None and (positions.is_floating_point() or positions.shape not in ((S,), (B, S))):
        given = f"{positions.dtype} {[*positions.shape]}"
        raise ValueError(f"positions must be integers, [{S}] or [{B}, {S}], not {given}")
