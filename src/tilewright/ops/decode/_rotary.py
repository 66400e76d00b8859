"""Rotary embedding of a tile as it is loaded: a second load fetches the other element of each pair."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    row_ptrs, cos_ptr, sin_ptr, positions, in_rows, offs_d, D, R, angles,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load rows of D elements; with tables [angles, R], rotate the first 2R elements of each by its position.

    A pair is (x[i], x[i + R]) or, interleaved, (x[2i], x[2i + 1]). A position outside of the tables gives NaN.
    """
    x = tl.load(row_ptrs[:, None] + offs_d[None, :], mask=in_rows[:, None] & (offs_d < D)[None, :], other=0.0)
    if cos_ptr is not None:
        if INTERLEAVED:
            other, pair, is_first = offs_d ^ 1, offs_d // 2, offs_d % 2 == 0
        else:
            is_first = offs_d < R
            other = tl.where(is_first, offs_d + R, offs_d - R)
            pair = tl.where(is_first, offs_d, offs_d - R)
        is_rotated = in_rows[:, None] & (offs_d < 2 * R)[None, :]
        y = tl.load(row_ptrs[:, None] + other[None, :], mask=is_rotated, other=0.0).to(tl.float32)
        at = positions.to(tl.int64)[:, None] * R + pair[None, :]
        has_angle = is_rotated & ((positions >= 0) & (positions < angles))[:, None]
        cos = tl.load(cos_ptr + at, mask=has_angle, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=has_angle, other=float("nan")).to(tl.float32)
        rotated = x.to(tl.float32) * cos + tl.where(is_first[None, :], -y, y) * sin
        x = tl.where(is_rotated, rotated.to(x.dtype), x)
    return x
