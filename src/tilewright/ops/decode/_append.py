"""Append: new keys and values, rotated and quantized, become the last tokens of a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.decode._reference import token_major
from tilewright.ops.decode._rotary import load_rotated
from tilewright.ops.rope import reference as rotate
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2

ELEMENTS = 4096  # per program


@triton.jit
def _append_rows(
    new_ptr, cache_ptr, scale_ptr, cos_ptr, sin_ptr, stride_h, stride_ch, h, position, D, HKV, R, angles, offs_d,
    INTERLEAVED: tl.constexpr, IS_FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Copy the heads of one token."""
    in_heads = h < HKV
    positions = tl.zeros_like(h) + position
    x = load_rotated(new_ptr + h * stride_h, cos_ptr, sin_ptr, positions, in_heads, offs_d, D, R, angles, INTERLEAVED)
    if scale_ptr is not None:
        x = x.to(tl.float32) / tl.load(scale_ptr + h, mask=in_heads, other=1.0)[:, None]
    if IS_FP8:  # saturates, whatever the conversion of this GPU does beyond the range
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    mask = in_heads[:, None] & (offs_d < D)[None, :]
    tl.store(cache_ptr + (h * stride_ch)[:, None] + offs_d[None, :], x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _append_fwd(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, stride_kb,
    stride_km, stride_kh, stride_vb, stride_vm, stride_vh, stride_kp, stride_kn, stride_kch, stride_vp, stride_vn,
    stride_vch, stride_tb, L, HKV, capacity, num_pages, D, R, angles,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
    IS_FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // L).to(tl.int64)
    token = tl.program_id(0) % L
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    position = tl.load(lengths_ptr + b).to(tl.int32) + token
    tl.device_assert((position >= 0) & (position < capacity), "a new token does not fit into the cache")
    if position < 0 or position >= capacity:
        return
    if PAGE == 0:
        page, row = b, position.to(tl.int64)
    else:
        page = tl.load(table_ptr + b * stride_tb + position // PAGE).to(tl.int64)
        row = (position % PAGE).to(tl.int64)
        tl.device_assert((page >= 0) & (page < num_pages), "the block table names a page outside of the cache")
    _append_rows(
        k_new_ptr + b * stride_kb + token * stride_km, k_ptr + page * stride_kp + row * stride_kn, k_scale_ptr,
        cos_ptr, sin_ptr, stride_kh, stride_kch, h, position, D, HKV, R, angles, offs_d, INTERLEAVED, IS_FP8, LARGEST,
    )  # fmt: skip
    _append_rows(
        v_new_ptr + b * stride_vb + token * stride_vm, v_ptr + page * stride_vp + row * stride_vn, v_scale_ptr,
        None, None, stride_vh, stride_vch, h, position, D, HKV, R, angles, offs_d, INTERLEAVED, IS_FP8, LARGEST,
    )  # fmt: skip


_launch = Launcher(_append_fwd)


class Append(NamedTuple):
    """The options of a call."""

    layout: str
    interleaved: bool


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


@cached_plan
def _plan(
    options: Append,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype | None, ...],
    table: tuple[int, int] | None,
    angles: tuple[int, int],
    device: int,
) -> Callable[..., None]:
    (B, L, HKV, D), (pages, tokens, _, _) = shapes
    block_d = max(16, next_power_of_2(D))
    block_h = min(next_power_of_2(HKV), max(1, ELEMENTS // block_d))
    return _launch.prepare(
        (B * L, cdiv(HKV, block_h)),
        *(stride for one in strides for stride in one[:3]), 0 if table is None else table[1], L, HKV,
        tokens if table is None else table[0] * tokens, pages, D, angles[1], angles[0],
        PAGE=0 if table is None else tokens, BLOCK_H=block_h, BLOCK_D=block_d, INTERLEAVED=options.interleaved,
        IS_FP8=is_fp8(dtypes[1]), LARGEST=torch.finfo(dtypes[1]).max, num_warps=4,  # type: ignore[arg-type]
    )  # fmt: skip


def _nothing(*_: object) -> None: ...


@operator("append_kv", fake=_nothing, mutates=("k_cache", "v_cache"))
def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Append,
) -> None:
    """Write k_new and v_new [B, L, HKV, D] to the tokens lengths … lengths + L - 1 of each sequence."""
    if not k_new.numel():
        return
    k_new, v_new = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_new, v_new))
    caches = [token_major(x, options.layout) for x in (k_cache, v_cache)]
    table = None if block_table is None else (block_table.shape[1], block_table.stride(0))
    plan = _plan(
        options,
        (k_new.shape, caches[0].shape),
        (k_new.stride(), v_new.stride(), caches[0].stride(), caches[1].stride()),
        tuple(None if x is None else x.dtype for x in (k_new, k_cache, lengths, block_table, cos)),
        table,
        (0, 0) if cos is None else (cos.shape[0], cos.shape[1]),
        k_new.get_device(),
    )
    plan(k_new, v_new, k_cache, v_cache, lengths, block_table, k_scale, v_scale, cos, sin)


def append_in_torch(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Append,
) -> None:
    """Do the same in torch operations."""
    B, L = k_new.shape[:2]
    positions = lengths.long()[:, None] + torch.arange(L, device=lengths.device)  # [B, L]
    if cos is not None:
        k_new = rotate(k_new, k_new[:, :, :0], cos, sin, positions, options.interleaved)[0]  # type: ignore[arg-type]
    for new, cache, scale in ((k_new, k_cache, k_scale), (v_new, v_cache, v_scale)):
        rows = token_major(cache, options.layout)
        new = new if scale is None else new.float() / scale[:, None]
        if is_fp8(cache.dtype):
            new = new.float().clamp(-torch.finfo(cache.dtype).max, torch.finfo(cache.dtype).max)
        if block_table is None:
            at: tuple[Any, Any] = torch.arange(B, device=lengths.device)[:, None], positions
        else:
            page = rows.shape[1]
            at = block_table.long().gather(1, positions // page), positions % page
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.dtype.itemsize]
        rows.view(bits)[at] = new.to(cache.dtype).view(bits)  # torch cannot index fp8
