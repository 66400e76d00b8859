"""Gated activations: y = f(gate) up, where gate and up are two tensors or, packed, the halves of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.activation._unary import FORMULAS, activation_grad, activation_of, flops
from tilewright.runtime.configs import ConfigTable, cached_plan
from tilewright.runtime.elementwise import as_rows, size_bucket, tile_grid, tile_shape, tile_start
from tilewright.runtime.eligibility import FLOATS, Dispatch, TensorKey, eligible, empty_like_options
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.spec import Cost, Draw, Op, points

# M and N are the sizes of the result.
SHAPES = {"M": (1, 33, 2), "N": (1, 60, 4099)}


def inputs(draw: Draw) -> tuple[Tensor, Tensor | None]:
    if draw["packed"]:
        return draw.randn("M", 2 * draw["N"], scale=2.0), None
    return draw.randn("M", "N", scale=2.0), draw.randn("M", "N")


def split_gate(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return gate and up, from two tensors or from one that holds both side by side."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def cost_of(act: str, gate: Tensor, up: Tensor | None) -> Cost:
    one = split_gate(gate, up)[0]
    return Cost(read=2 * one.nbytes, written=one.nbytes, flops=flops(act, one.numel(), more=1))


def backward_cost_of(act: str, gate: Tensor, up: Tensor | None) -> Cost:
    one = split_gate(gate, up)[0]
    work = flops(act, one.numel(), backward=True, more=3)
    return Cost(read=3 * one.nbytes, written=2 * one.nbytes, flops=work)


@triton.jit
def _gate_tile_fwd(gate_ptrs, up_ptrs, y_ptrs, mask, ACT: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    y = activation_of(gate, ACT, y_ptrs.dtype.element_ty.primitive_bitwidth) * up
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _gated_fwd(
    gate_ptr,
    up_ptr,
    y_ptr,
    stride_gm,
    stride_um,
    stride_ym,
    M,
    N,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    start_m, start_n = tile_start(BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    gate_ptrs = gate_ptr + offs_m * stride_gm + offs_n
    up_ptrs = up_ptr + offs_m * stride_um + offs_n
    y_ptrs = y_ptr + offs_m * stride_ym + offs_n
    if (start_m + BLOCK_M <= M) & (start_n + BLOCK_N <= N):  # without a mask accesses stay wide whatever N is
        _gate_tile_fwd(gate_ptrs, up_ptrs, y_ptrs, None, ACT)
    else:
        _gate_tile_fwd(gate_ptrs, up_ptrs, y_ptrs, (offs_m < M) & (offs_n < N), ACT)


@triton.jit
def _gate_tile_bwd(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, mask, ACT: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    y, dgate = activation_grad(gate, dy * up, ACT)
    tl.store(dgate_ptrs, dgate.to(dgate_ptrs.dtype.element_ty), mask=mask)
    tl.store(dup_ptrs, (dy * y).to(dup_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _gated_bwd(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    stride_gm,
    stride_um,
    stride_ym,
    stride_dm,
    M,
    N,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    start_m, start_n = tile_start(BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    gate_ptrs = gate_ptr + offs_m * stride_gm + offs_n
    up_ptrs = up_ptr + offs_m * stride_um + offs_n
    dy_ptrs = dy_ptr + offs_m * stride_ym + offs_n
    dgate_ptrs = dgate_ptr + offs_m * stride_dm + offs_n
    dup_ptrs = dup_ptr + offs_m * stride_dm + offs_n
    if (start_m + BLOCK_M <= M) & (start_n + BLOCK_N <= N):
        _gate_tile_bwd(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, None, ACT)
    else:
        mask = (offs_m < M) & (offs_n < N)
        _gate_tile_bwd(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, mask, ACT)


def _default(*key: object) -> dict[str, int]:
    return {"block": 512 if key[-1] == "small" else 2048, "num_warps": 4}


def _choices(*key: object) -> list[dict[str, int]]:
    blocks = (256, 512, 1024, 2048) if key[-1] == "small" else (1024, 2048, 4096, 8192)
    return [{"block": block, "num_warps": warps} for block in blocks for warps in (4, 8)]


CONFIG = ConfigTable("gated.json", _default, _choices)
_launch_fwd = Launcher(_gated_fwd)
_launch_bwd = Launcher(_gated_bwd)


LAUNCHERS = {"fwd": _launch_fwd, "bwd": _launch_bwd}
Sizes = tuple[int, int, tuple[int, ...]]  # rows, columns, and the row stride of each tensor


@cached_plan
def _plan(direction: str, act: str, dtypes: tuple[torch.dtype, ...], device: int, sizes: Sizes) -> PreparedLaunch:
    M, N, strides = sizes
    form = "flat" if M == 1 else "rows"
    config = CONFIG(device, direction, form, act, dtypes[0].itemsize, size_bucket(M * N))
    BLOCK_M, BLOCK_N = tile_shape(M, N, config["block"])
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": config["num_warps"]}
    return LAUNCHERS[direction].prepare(tile_grid(M, N, BLOCK_M, BLOCK_N), *strides, M, N, ACT=act, **blocks)


def _contiguous_sizes(tensors: int, elements: int) -> Sizes:
    """Return the sizes of contiguous tensors: one row."""
    return 1, elements, (0,) * tensors


def _sizes(*tensors: Tensor) -> Sizes:
    """Return the sizes of tensors [M, N]."""
    if all(t.is_contiguous() for t in tensors):
        return _contiguous_sizes(len(tensors), tensors[0].numel())
    M, N = tensors[0].shape
    return M, N, tuple(t.stride(0) for t in tensors)


def _rows(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return split_gate(as_rows(gate), None if up is None else as_rows(up))


def _result(gate: Tensor, up: Tensor | None, *_: object) -> Tensor:
    if up is not None:
        return contiguous_like(gate)
    *sizes, both = gate.shape
    return gate.new_empty(*sizes, both // 2)


def _gradients(gate: Tensor, up: Tensor | None, *_: object) -> list[Tensor]:
    return [contiguous_like(gate)] if up is None else [contiguous_like(gate), contiguous_like(up)]


@operator("gated", fake=_result)
def gated(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    """The activation of the gate times up; without up, `gate` holds both."""
    y = _result(gate, up)
    if N := y.numel():
        if up is not None and gate.is_contiguous() and up.is_contiguous():
            first, second, out, sizes = gate, up, y, _contiguous_sizes(3, N)
        else:
            first, second = _rows(gate, up)
            out = as_rows(y)
            sizes = _sizes(first, second, out)
        _plan("fwd", act, (first.dtype, second.dtype), gate.get_device(), sizes)(first, second, out)
    return y


@operator("gated_backward", fake=_gradients)
def gated_backward(gate: Tensor, up: Tensor | None, dy: Tensor, act: str) -> list[Tensor]:
    """The gradients of gate and up, or of the tensor that holds both."""
    grads = _gradients(gate, up)
    if N := dy.numel():
        if up is not None and gate.is_contiguous() and up.is_contiguous() and dy.is_contiguous():
            first, second, out, outs, sizes = gate, up, dy, grads, _contiguous_sizes(4, N)
        else:
            first, second = _rows(gate, up)
            out, outs = as_rows(dy), _rows(*grads)
            sizes = _sizes(first, second, out, outs[0])  # both gradients have the same strides
        dtypes = first.dtype, second.dtype, out.dtype
        _plan("bwd", act, dtypes, gate.get_device(), sizes)(first, second, out, *outs)
    return grads


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy: Tensor):
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        first, second = split_gate(gate, up)
        needed = [t for t, needs in zip((gate, up), ctx.needs_input_grad, strict=False) if needs]
        found = iter(torch.autograd.grad(FORMULAS[ctx.act](first) * second, needed, dy, create_graph=True))
        return tuple(next(found) if needs else None for needs in ctx.needs_input_grad[:2])
    grads = [*gated_backward(gate, up, dy, ctx.act), None]
    return tuple(g if needs else None for g, needs in zip(grads, ctx.needs_input_grad, strict=False))


gated.differentiate(_save, _backward)


@cached_plan
def _plan_call(act: str, gate: TensorKey, up: TensorKey | None) -> Callable[..., Tensor] | None:
    shape, dtype, device = gate
    if up is None:
        _require_even(shape)
    elif up != gate:
        return None
    if not shape or dtype not in FLOATS or not math.prod(shape):
        return None
    if up is None:
        *outer, both = shape
        N = both // 2
        M = math.prod(outer)
        launch = _plan("fwd", act, (dtype, dtype), device, (M, N, (both, both, N)))

        def run(gate: Tensor, up: Tensor | None) -> Tensor:
            y = gate.new_empty(*outer, N)
            launch(gate, gate.narrow(-1, N, N), y)
            return y

    else:
        launch = _plan("fwd", act, (dtype, dtype), device, _contiguous_sizes(3, math.prod(shape)))
        options = empty_like_options(shape)

        def run(gate: Tensor, up: Tensor | None) -> Tensor:
            y = torch.empty_like(gate, **options)
            launch(gate, up, y)
            return y

    return run


def _call(act: str, gate: Tensor, up: Any) -> Tensor | None:
    if up is None:
        _require_even(gate.shape)
    # Inductor fuses torch's own operations with their neighbors; it cannot look into ours.
    if torch.compiler.is_compiling() or gate.dim() == 0:
        return None
    if up is not None and not (isinstance(up, Tensor) and up.shape == gate.shape):
        return None
    is_eligible = eligible(gate) if up is None else eligible(gate, up)
    return gated(gate, up, act) if is_eligible else None


def _require_even(shape: torch.Size) -> None:
    if not shape or shape[-1] % 2:
        raise ValueError(f"without up, gate holds both: its last dimension must be even, not that of {[*shape]}")


dispatch = Dispatch(_plan_call, _call)


def gated_op(name: str, act: str, reference: Callable[..., Tensor]) -> Op:
    """Return the Op of a gated activation."""
    return Op(
        name,
        reference,
        cost=lambda gate, up: cost_of(act, gate, up),
        inputs=inputs,
        check=[*points(**SHAPES, packed=(False, False, False)), *points(**SHAPES, packed=(True, True, True))],
        bench=points(M=(4096, 4096, 16384, 16384), N=(4096, 4096, 14336, 14336), packed=(False, True, False, True)),
        backward_cost=lambda gate, up: backward_cost_of(act, gate, up),
        batch="M",
        draws={"N": "intermediate"},
    )
