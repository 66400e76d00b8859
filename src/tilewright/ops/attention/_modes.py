"""Attention with every mode as operators registered with torch: launches, configurations and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.attention._backward import _modes_bwd_dbias, _modes_bwd_dkdv, _modes_bwd_dq
from tilewright.ops.attention._block_mask import block_lists, diagonal, sides
from tilewright.ops.attention._formula import Modes, attend_with_modes
from tilewright.ops.attention._forward import _modes_fwd
from tilewright.ops.attention._mods import mod
from tilewright.ops.attention._operators import (
    DELTA_ROWS,
    LARGE_SHARED,
    LOG2_E,
    _blocks,
    _heads_at_once,
    _launch_delta,
    _rows,
    _strides,
)
from tilewright.ops.attention._score import kept
from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.launch import Launcher, shared_memory
from tilewright.runtime.operator import operator, scatter
from tilewright.runtime.sizes import cdiv, next_power_of_2

# BLOCK_M, BLOCK_N, num_warps, num_stages by the largest head size: for LARGE_SHARED memory, for less, and for fp32.
LARGE = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 1)},
    "dkdv": {64: (64, 64, 8, 1), 128: (32, 64, 8, 1), 256: (32, 32, 8, 1)},
    "dq": {64: (64, 64, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 4, 2)},
    "dbias": {64: (64, 64, 8, 1), 128: (64, 32, 8, 1), 256: (32, 32, 8, 1)},
}
SMALL = {
    "fwd": {64: (64, 64, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 1)},
    "dkdv": {64: (32, 64, 8, 1), 128: (32, 32, 8, 1), 256: (16, 32, 8, 1)},
    "dq": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
    "dbias": {64: (32, 64, 8, 1), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
}
FP32 = {
    "fwd": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "dkdv": {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
    "dq": {64: (32, 32, 8, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
    "dbias": {64: (32, 32, 8, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}
KEPT_BLOCK = 1024


def _default(kernel: str, size: int, head: int, is_large: bool, functions: int) -> Config:
    m, n, warps, stages = (FP32 if size == 4 else LARGE if is_large else SMALL)[kernel][head]
    for halving in range(min(functions, 2)):  # fewer pairs, whose temporaries are in registers
        if (kernel == "dkdv") == (halving == 0):
            m = max(16, m // 2)
        else:
            n = max(16, n // 2)
    is_tiny = m * n <= 512 and kernel != "dkdv"  # dkdv holds two accumulators
    return _blocks(m, n, 4 if is_tiny else warps, stages)


def _choices(kernel: str, size: int, head: int, is_large: bool, functions: int) -> list[Config]:
    widths = [n for n in (16, 32, 64, 128) if n * head * size <= 2**15]
    return [_blocks(m, n, w, s) for m in widths for n in widths for w in (4, 8) for s in (1, 2, 3) if m * n >= 1024]


BLOCKS = ConfigTable("attention_modes.json", _default, _choices)
_launch_fwd = Launcher(_modes_fwd)
_launch_dkdv = Launcher(_modes_bwd_dkdv)
_launch_dq = Launcher(_modes_bwd_dq)
_launch_dbias = Launcher(_modes_bwd_dbias)


@triton.jit
def _dropout_kept(kept_ptr, seed_ptr, LQ, LK, dropout_p, BLOCK: tl.constexpr):
    """Write which probabilities of a head dropout keeps [LQ, LK]."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    i = (offs // LK).to(tl.int32)
    j = (offs % LK).to(tl.int32)
    is_kept = kept(tl.load(seed_ptr), head, i, j, dropout_p)
    pairs = tl.cast(LQ, tl.int64) * LK  # LQ is a constant if it is 1
    tl.store(kept_ptr + head.to(tl.int64) * pairs + offs, is_kept, mask=offs < pairs)


_launch_kept = Launcher(_dropout_kept)


def dropout_kept(seed: Tensor, shape: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """Return which probabilities [B, H, LQ, LK] the kernels keep: what the formula needs to replay a call."""
    B, H, LQ, LK = shape
    found = torch.empty(shape, dtype=torch.bool, device=seed.device)
    if found.numel():
        _launch_kept((cdiv(LQ * LK, KEPT_BLOCK), B * H), found, seed, LQ, LK, dropout_p, BLOCK=KEPT_BLOCK)
    return found


def _config(kernel: str, q: Tensor, v: Tensor, modes: Modes) -> Config:
    D, DV = q.shape[-1], v.shape[-1]
    head = next(largest for largest in FP32[kernel] if largest >= max(D, DV))
    functions = (modes.dropout_p > 0) + (modes.softcap > 0) + (modes.score_mod is not None)  # computed for every pair
    block_d, block_dv = (max(16, next_power_of_2(n)) for n in (D, DV))
    return {
        **BLOCKS(q, kernel, q.element_size(), head, shared_memory(q.get_device()) >= LARGE_SHARED, functions),
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "EVEN_D": block_d == D,
        "EVEN_DV": block_dv == DV,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }


class _Call:
    """Arguments that the launches of one call have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        alibi_slopes: Tensor | None,
        seed: Tensor | None,
        sees: Tensor | None,
        seen_by: Tensor | None,
        modes: Modes,
    ):
        self.q, self.k, self.v, self.modes, self._sees, self._seen_by = (
            _rows(q),
            _rows(k),
            _rows(v),
            modes,
            sees,
            seen_by,
        )
        (B, self.H, self.LQ, D), (HKV, self.LK), DV = q.shape, k.shape[1:3], v.shape[-1]
        self.B, self.HKV = B, HKV
        bias, mask = (x if x is None else x.expand(B, self.H, self.LQ, self.LK) for x in (bias, mask))
        slopes = None if alibi_slopes is None else alibi_slopes.expand(B, self.H)
        self.score_tensors = bias, None if mask is None else mask.view(torch.uint8), slopes
        self.score_strides = [n for x, dims in ((bias, 4), (mask, 4), (slopes, 2)) for n in _strides_of(x, dims)]
        self.seed = seed
        self.sizes = B, self.H, HKV, self.LQ, self.LK, D, DV, *diagonal(modes, self.LQ, self.LK)
        self.numbers = modes.scale, modes.softcap, modes.dropout_p
        score = None if modes.score_mod is None else mod(modes.score_mod)
        is_modified = modes.softcap or score or bias is not None or slopes is not None or modes.scale <= 0
        self.flags: dict[str, Any] = {
            **sides(modes),
            "HAS_SOFTCAP": modes.softcap > 0,
            "MODIFIED": bool(is_modified),
            "SCORE_MOD": score and score.function,
            "SCORE_GRADIENT": score and score.gradient,
            "MASK_MOD": None if modes.mask_mod is None else mod(modes.mask_mod).function,
        }

    def heads_at_once(self, of_keys: bool) -> int:
        heads, streamed = (self.HKV, self.q) if of_keys else (self.H, self.k)
        return _heads_at_once(self.B * heads, streamed, self.modes.right is not None)

    def bounds(self, of_keys: bool) -> list[Tensor | None]:
        """Return the ranges that one side sees, and the centers of the queries, where documents decide them."""
        if self._sees is None or self._seen_by is None:
            return [None, None, None]
        begin, end, _ = self._seen_by if of_keys else self._sees
        return [begin, end, self._sees[2]]

    def visiting(self, config: Config, of_keys: bool) -> tuple[list[Tensor | None], tuple[int, int], Config]:
        """Return the tensors and strides by which a kernel finds the blocks it visits, and whether any needs a mask."""
        lengths, blocks = (self.LQ, self.LK), (config["BLOCK_M"], config["BLOCK_N"])
        if self.modes.mask_mod is not None:
            of = (self.B, self.H), lengths, self.modes, self._sees, blocks, self.q.device, of_keys
            lists = block_lists(*of)
            return [*self.bounds(of_keys), *lists], lists.strides(), {"MASKED": True}
        is_even = (self.LQ % blocks[0] if of_keys else self.LK % blocks[1]) == 0
        is_bounded = self._sees is not None or self.modes.left is not None or self.modes.right is not None
        return [*self.bounds(of_keys), None, None], (0, 0), {"MASKED": is_bounded or not is_even}


def _strides_of(x: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else x.stride()


def _empty_heads(like: Tensor, size: int) -> Tensor:
    """Return an uninitialized tensor of other head size, with heads inside or outside of positions as in `like`."""
    B, H, L, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(B, L, H, size).transpose(1, 2)
    return like.new_empty(B, H, L, size)


def _empty_output(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_heads(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("attention_with_modes", fake=_empty_output)
def attention_with_modes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    sees: Tensor | None,
    seen_by: Tensor | None,
    modes: Modes,
) -> tuple[Tensor, Tensor]:
    """The output and the base-2 log-sum-exp of each row of scores. q, k and v may not be empty.

    `bias` and `mask` have four dimensions, and slopes two, which broadcast. `sees` and `seen_by` are what `seen`
    returns for the queries and the keys of documents.
    """
    out, lse = _empty_output(q, k, v)
    call = _Call(q, k, v, bias, mask, alibi_slopes, seed, sees, seen_by, modes)
    config = _config("fwd", q, v, modes)
    visited, strides, masked = call.visiting(config, of_keys=False)
    _launch_fwd(
        (cdiv(call.LQ, config["BLOCK_M"]) * call.B * call.H,),
        call.q, call.k, call.v, *call.score_tensors, sinks, seed, *visited, out, lse,
        *_strides(call.q, call.k, call.v), *call.score_strides, *strides, *_strides(out), *call.sizes,
        call.heads_at_once(of_keys=False), *call.numbers, **call.flags, **masked, **config,
    )  # fmt: skip
    return out, lse


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, slopes: Tensor | None,
    sinks: Tensor | None, seed: Tensor | None, sees: Tensor | None, seen_by: Tensor | None, out: Tensor, lse: Tensor,
    dout: Tensor, dlse: Tensor | None, wanted: Sequence[bool], modes: Modes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wants_kv = wanted[1] or wanted[2]  # one kernel computes both
    dq, dk, dv = (_empty_heads(x, x.shape[-1] if n else 0) for x, n in ((q, wanted[0]), (k, wants_kv), (v, wants_kv)))
    others = zip((bias, slopes, sinks), wanted[3:], strict=True)
    dbias, dslopes, dsinks = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None and is_wanted else q.new_empty(0)
        for x, is_wanted in others
    )
    return dq, dk, dv, dbias, dslopes, dsinks


@operator("attention_with_modes_backward", fake=_empty_gradients)
def attention_with_modes_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    sees: Tensor | None,
    seen_by: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Sequence[bool],
    modes: Modes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, bias, slopes and sinks; those that are not wanted may be empty."""
    call = _Call(q, k, v, bias, mask, alibi_slopes, seed, sees, seen_by, modes)
    dout = _rows(dout)
    dq, dk, dv, dbias, dslopes, dsinks = _empty_gradients(
        q, k, v, bias, mask, alibi_slopes, sinks, seed, sees, seen_by, out, lse, dout, dlse, wanted, modes
    )
    delta = torch.empty_like(lse)
    heads, DV = call.B * call.H, v.shape[-1]
    _launch_delta(
        (heads, cdiv(call.LQ, DELTA_ROWS)),
        out, dout, delta, *_strides(out, dout), call.H, call.LQ, DV, BLOCK_M=DELTA_ROWS, BLOCK_D=next_power_of_2(DV),
    )  # fmt: skip
    if dlse is not None:
        delta -= dlse * LOG2_E  # lse is in base 2
    inputs = call.q, call.k, call.v, *call.score_tensors, seed
    input_strides = [*_strides(call.q, call.k, call.v), *call.score_strides]
    wants_q, wants_k, wants_v, wants_bias, wants_slopes, wants_sinks = wanted
    if wants_k or wants_v:
        config = _config("dkdv", q, v, modes)
        visited, strides, masked = call.visiting(config, of_keys=True)
        _launch_dkdv(
            (cdiv(call.LK, config["BLOCK_N"]) * call.B * call.HKV,),
            *inputs, *visited, dout, lse, delta, dk, dv, *input_strides, *strides, *_strides(dout, dk, dv),
            *call.sizes, call.heads_at_once(of_keys=True), *call.numbers, **call.flags, **masked, **config,
        )  # fmt: skip
    if wants_q or wants_slopes:
        config = _config("dq", q, v, modes)
        written = dq if wants_q else _empty_heads(q, q.shape[-1])
        by_row = torch.empty_like(lse) if wants_slopes else None
        visited, strides, masked = call.visiting(config, of_keys=False)
        _launch_dq(
            (cdiv(call.LQ, config["BLOCK_M"]) * heads,),
            *inputs, *visited, dout, lse, delta, written, by_row, *input_strides, *strides, *_strides(dout, written),
            *call.sizes, call.heads_at_once(of_keys=False), *call.numbers, **call.flags, **masked, **config,
        )  # fmt: skip
        if by_row is not None and alibi_slopes is not None:
            dslopes = by_row.sum(-1).sum_to_size(alibi_slopes.shape).to(alibi_slopes.dtype)
    if wants_bias and bias is not None:
        dbias = _bias_gradient(call, bias, inputs, (dout, lse, delta), [*input_strides, *_strides(dout)])
    if wants_sinks and sinks is not None:  # a sink's value is zero, so the gradient of its probability is -delta
        p = torch.exp2(sinks.float()[:, None] * LOG2_E - lse).masked_fill(lse == -torch.inf, 0.0)
        dsinks = -(p * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dbias, dslopes, dsinks


def _bias_gradient(
    call: _Call, bias: Tensor, inputs: tuple[Any, ...], rows: tuple[Tensor, ...], strides: list[int]
) -> Tensor:
    """Return the gradient of the bias, summed over its broadcast dimensions."""
    config = _config("dbias", call.q, call.v, call.modes)
    B, H, M, N = bias.shape
    shared_m, shared_n = M != call.LQ or M == 1, N != call.LK or N == 1
    tiles = (1 if shared_m else cdiv(M, config["BLOCK_M"])) * (1 if shared_n else cdiv(N, config["BLOCK_N"]))
    dbias = torch.empty(bias.shape, dtype=torch.float32, device=bias.device)
    _launch_dbias(
        (tiles, H, B),
        *inputs, *call.bounds(of_keys=False), *rows, dbias, *strides, *call.sizes[1:], *call.numbers,
        call.B // B, call.H // H, M, N, SHARED_M=shared_m, SHARED_N=shared_n, **call.flags, **config,
    )  # fmt: skip
    return dbias.to(bias.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.modes = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    wanted = [needed[n] for n in (0, 1, 2, 3, 5, 6)]  # q, k, v, bias, slopes, sinks
    if ctx.modes.score_mod is not None and mod(ctx.modes.score_mod).gradient is None:
        raise TypeError("a @triton.jit score_mod has no gradient. Write it as a Python function.")
    if torch.is_grad_enabled():  # double backward: torch differentiates the formula again
        found = _differentiated_formula(tensors, wanted, dout, dlse, ctx.modes)
    else:
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = attention_with_modes_backward(*tensors, out, lse, dout, dlse, wanted, ctx.modes)
        found = scatter(itertools.compress(gradients, wanted), wanted)
    dq, dk, dv, dbias, dslopes, dsinks = found
    return dq, dk, dv, dbias, None, dslopes, dsinks


def _differentiated_formula(
    tensors: Sequence[Any], wanted: Sequence[bool], dout: Tensor | None, dlse: Tensor | None, modes: Modes
) -> list[Tensor | None]:
    # Distinct views, even if one tensor is passed as several of them.
    tensors = [x if x is None else x.view_as(x) for x in tensors]
    q, k, v, bias, mask, slopes, sinks, seed, sees, _ = tensors
    is_kept = None if seed is None else dropout_kept(seed, (*q.shape[:3], k.shape[2]), modes.dropout_p)
    out, lse = attend_with_modes(q, k, v, bias, mask, slopes, sinks, sees, is_kept, modes)
    given = [(x, dx) for x, dx in ((out, dout), (lse * LOG2_E, dlse)) if dx is not None]
    outputs, gradients = zip(*given, strict=True)
    leaves = [*itertools.compress((q, k, v, bias, slopes, sinks), wanted)]
    return scatter(torch.autograd.grad(outputs, leaves, gradients, create_graph=True), wanted)


attention_with_modes.differentiate(_save, _backward)
