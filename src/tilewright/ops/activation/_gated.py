"""What gated activations share: y = f(gate) up, where gate and up are tensors of their own or the halves of one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.activation._unary import FORMULAS, activated, flops, pulled_back
from tilewright.runtime.configs import Tuned, planned
from tilewright.runtime.elementwise import as_rows, bucket, tile, tile_shape, tiles
from tilewright.runtime.eligibility import runs_here
from tilewright.runtime.launch import Launcher, Prepared
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.spec import Cost, Draw

# A case names its sizes M and N, N those of the result, and whether the input is packed.
SHAPES = {"M": (1, 33, 2), "N": (1, 60, 4099)}


def inputs(draw: Draw) -> tuple[Tensor, Tensor | None]:
    if draw["packed"]:
        return draw.randn("M", 2 * draw["N"], scale=2.0), None
    return draw.randn("M", "N", scale=2.0), draw.randn("M", "N")


def halves(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gate and up, of two tensors or of one that holds both side by side."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def cost_of(act: str, gate: Tensor, up: Tensor | None) -> Cost:
    one = halves(gate, up)[0]
    return Cost(read=2 * one.nbytes, written=one.nbytes, flops=flops(act, one.numel(), more=1))


def backward_cost_of(act: str, gate: Tensor, up: Tensor | None) -> Cost:
    one = halves(gate, up)[0]
    work = flops(act, one.numel(), backward=True, more=3)
    return Cost(read=3 * one.nbytes, written=2 * one.nbytes, flops=work)


@triton.jit
def _gate_tile(gate_ptrs, up_ptrs, y_ptrs, mask, ACT: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    y = activated(gate, ACT, y_ptrs.dtype.element_ty.primitive_bitwidth) * up
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
    start_m, start_n = tile(BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    gate_ptrs = gate_ptr + offs_m * stride_gm + offs_n
    up_ptrs = up_ptr + offs_m * stride_um + offs_n
    y_ptrs = y_ptr + offs_m * stride_ym + offs_n
    if (start_m + BLOCK_M <= M) & (start_n + BLOCK_N <= N):  # without a mask accesses stay wide whatever N is
        _gate_tile(gate_ptrs, up_ptrs, y_ptrs, None, ACT)
    else:
        _gate_tile(gate_ptrs, up_ptrs, y_ptrs, (offs_m < M) & (offs_n < N), ACT)


@triton.jit
def _gate_tile_back(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, mask, ACT: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    y, dgate = pulled_back(gate, dy * up, ACT)
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
    start_m, start_n = tile(BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    gate_ptrs = gate_ptr + offs_m * stride_gm + offs_n
    up_ptrs = up_ptr + offs_m * stride_um + offs_n
    dy_ptrs = dy_ptr + offs_m * stride_ym + offs_n
    dgate_ptrs = dgate_ptr + offs_m * stride_dm + offs_n
    dup_ptrs = dup_ptr + offs_m * stride_dm + offs_n
    if (start_m + BLOCK_M <= M) & (start_n + BLOCK_N <= N):
        _gate_tile_back(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, None, ACT)
    else:
        mask = (offs_m < M) & (offs_n < N)
        _gate_tile_back(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, mask, ACT)


def _default(*key: object) -> dict[str, int]:
    return {"block": 512 if key[-1] == "small" else 2048, "num_warps": 4}


def _choices(*key: object) -> list[dict[str, int]]:
    blocks = (256, 512, 1024, 2048) if key[-1] == "small" else (1024, 2048, 4096, 8192)
    return [{"block": block, "num_warps": warps} for block in blocks for warps in (4, 8)]


CONFIG = Tuned("gated.json", _default, _choices)
_launch_fwd = Launcher(_gated_fwd)
_launch_bwd = Launcher(_gated_bwd)


LAUNCHERS = {"fwd": _launch_fwd, "bwd": _launch_bwd}
Sizes = tuple[int, int, tuple[int, ...]]  # of all tensors the rows and columns, and of each the rows' stride


@planned
def _plan(direction: str, act: str, dtypes: tuple[torch.dtype, ...], device: int, sizes: Sizes) -> Prepared:
    M, N, strides = sizes
    form = "flat" if M == 1 else "rows"
    config = CONFIG(device, direction, form, act, dtypes[0].itemsize, bucket(M * N))
    BLOCK_M, BLOCK_N = tile_shape(M, N, config["block"])
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": config["num_warps"]}
    return LAUNCHERS[direction].prepare(tiles(M, N, BLOCK_M, BLOCK_N), *strides, M, N, ACT=act, **blocks)


def _flat(tensors: int, elements: int) -> Sizes:
    """Of runs of memory: then rows do not matter."""
    return 1, elements, (0,) * tensors


def _sizes(*tensors: Tensor) -> Sizes:
    """Of tensors [M, N]."""
    if all(t.is_contiguous() for t in tensors):
        return _flat(len(tensors), tensors[0].numel())
    M, N = tensors[0].shape
    return M, N, tuple(t.stride(0) for t in tensors)


def _rows(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return halves(as_rows(gate), None if up is None else as_rows(up))


def _result(gate: Tensor, up: Tensor | None, *_: object) -> Tensor:
    if up is not None:
        return contiguous_like(gate)
    *sizes, both = gate.shape
    return gate.new_empty(*sizes, both // 2)


def _gradients(gate: Tensor, up: Tensor | None, *_: object) -> list[Tensor]:
    return [contiguous_like(gate)] if up is None else [contiguous_like(gate), contiguous_like(up)]


@operator("gated", fake=_result)
def gated(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    """The named activation of the gate, times up; without up both are halves of `gate`."""
    y = _result(gate, up)
    if N := y.numel():
        if up is not None and gate.is_contiguous() and up.is_contiguous():
            first, second, out, sizes = gate, up, y, _flat(3, N)
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
            first, second, out, outs, sizes = gate, up, dy, grads, _flat(4, N)
        else:
            first, second = _rows(gate, up)
            out, outs = as_rows(dy), _rows(*grads)
            sizes = _sizes(first, second, out, outs[0])  # both gradients lie alike
        dtypes = first.dtype, second.dtype, out.dtype
        _plan("bwd", act, dtypes, gate.get_device(), sizes)(first, second, out, *outs)
    return grads


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy: Tensor):
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        first, second = halves(gate, up)
        needed = [t for t, needs in zip((gate, up), ctx.needs_input_grad, strict=False) if needs]
        found = iter(torch.autograd.grad(FORMULAS[ctx.act](first) * second, needed, dy, create_graph=True))
        return *(next(found) if needs else None for needs in ctx.needs_input_grad[:2]), None
    grads = [*gated_backward(gate, up, dy, ctx.act), None]
    return *(g if needs else None for g, needs in zip(grads, ctx.needs_input_grad, strict=False)), None


gated.differentiate(_save, _backward)


def fits(smallest: float, gate: Any, up: Any) -> bool:
    """Whether our kernels take this call. Raises where one tensor cannot be both."""
    if up is None and isinstance(gate, Tensor) and (not gate.dim() or gate.shape[-1] % 2):
        raise ValueError(f"without up, the last dimension of gate holds both: it is even, not that of {[*gate.shape]}")
    if torch.compiler.is_compiling():  # Inductor fuses torch's own with its neighbours
        return False
    if not isinstance(gate, Tensor) or gate.dim() == 0 or gate.numel() < smallest:
        return False
    if up is None:
        return runs_here(gate)
    return isinstance(up, Tensor) and up.shape == gate.shape and runs_here(gate, up)
