"""What the activations share: formulas, and kernels that apply one to every element, alone or after adding a bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tilewright.runtime.configs import Tuned, planned
from tilewright.runtime.elementwise import bucket, may_change, takes, tile, tiles
from tilewright.runtime.eligibility import FLOATS, filling, has_at_least, is_quiet, is_ready, runs_here
from tilewright.runtime.launch import Launcher, Prepared
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.partial_sums import add_up
from tilewright.runtime.pdl import can_follow, let_follow
from tilewright.runtime.sizes import cdiv, next_power_of_2

FORMULAS = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}  # by torch's name of the approximation
FLOPS = {  # of fp32 and of the special function unit, for an element: forward, backward
    "relu": ((1, 0), (2, 0)),
    "relu_squared": ((2, 0), (4, 0)),
    "silu": ((4, 1), (7, 1)),
    "gelu": ((20, 1), (24, 1)),
    "gelu_tanh": ((8, 1), (18, 1)),
}


def flops(act: str, elements: int, *, backward: bool = False, more: int = 0) -> dict[str, float]:
    """What an activation of so many elements computes, and `more` fp32 operations for each."""
    fp32, special = FLOPS[act][backward]
    return {"fp32": (fp32 + more) * elements, "special": special * elements}


@triton.jit
def _normal_tail(x):
    """P(Z < -|x|) for a normal Z, and exp(-x^2 / 2)."""
    t = libdevice.fast_dividef(1.0, 1.0 + tl.abs(0.336 * x))  # what is divided by 2**126 and more is zero
    p = 0.047817265 * t - 0.22098947
    p = p * t + 0.31441771
    p = p * t - 0.078385019
    p = p * t + 0.1812564
    p = p * t + 0.12026365
    p = p * t + 0.13570264
    p = p * t - 8.3162312e-5
    bell = tl.exp2(x * (-0.72134752 * x))  # log2(e) / 2
    return bell * p, bell


@triton.jit
def _narrow_tail(x):
    """P(Z < -|x|) to 13 bits, in fewer steps: more than 16-bit results can hold."""
    u = 0.8493218 * x  # the root of log2(e) / 2, so that the bell is exp2(-u^2)
    t = libdevice.fast_dividef(1.0, 1.8070677 + tl.abs(u))
    p = -1.3434764 * t + 1.7267687
    p = p * t + 0.45359511
    p = p * t + 0.35207696
    p = p * t - 4.0703637e-4
    return tl.exp2(u * (u * -1.0)) * p


@triton.jit
def _tanh_odds(x):
    """2a log2(e): the logarithm to base 2 of s / (1 - s), where gelu = x s."""
    return x * (2.3022082 + 0.10294324 * (x * x))


@triton.jit
def _gelu_parts(x):
    """s, where gelu = x s, and the slope of gelu."""
    tail, bell = _normal_tail(x)
    s = tl.where(x > 0, 1.0 - tail, tail)
    return s, s + 0.39894228 * (x * bell)


@triton.jit
def _gelu_tanh_parts(x):
    odds = _tanh_odds(x)
    e = tl.exp2(tl.abs(odds) * -1.0)
    larger = libdevice.fast_dividef(1.0, 1.0 + e)  # of s and 1 - s
    s = tl.where(odds > 0, larger, e * larger)
    near = tl.minimum(tl.maximum(x, -16.0), 16.0)  # beyond, e is zero
    return s, s + e * larger * larger * near * (1.5957691 + 0.21406445 * (near * near))


@triton.jit
def activated(x, ACT: tl.constexpr, BITS: tl.constexpr = 32):
    """The activation of fp32 values, for results of so many bits."""
    if ACT == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu_squared":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return x * x
    elif ACT == "silu":
        return libdevice.fast_dividef(x, 1.0 + tl.exp2(-1.442695 * x))  # zero where the exponential overflows
    elif ACT == "gelu_tanh":
        return libdevice.fast_dividef(x, 1.0 + tl.exp2(-_tanh_odds(x)))
    elif BITS == 16:
        tail = _narrow_tail(x)
        return x * tl.where(x > 0, 1.0 - tail, tail)
    else:
        s, _ = _gelu_parts(x)
        return x * s


@triton.jit
def pulled_back(x, dy, ACT: tl.constexpr):
    """The activation of fp32 values, and their gradient from that of the result."""
    if ACT == "relu":
        return activated(x, ACT), tl.where(x <= 0, 0.0, dy)
    elif ACT == "relu_squared":
        return activated(x, ACT), tl.where(x <= 0, 0.0, 2.0 * x * dy)
    elif ACT == "silu":
        s = libdevice.fast_dividef(1.0, 1.0 + tl.exp2(-1.442695 * x))
        y = x * s
        return y, dy * (s + y * (1.0 - s))
    elif ACT == "gelu_tanh":
        s, slope = _gelu_tanh_parts(x)
        return x * s, dy * slope
    else:
        s, slope = _gelu_parts(x)
        return x * s, dy * slope


@triton.jit
def _activation_fwd(x_ptr, y_ptr, N, ACT: tl.constexpr, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK_N  # int64: N may pass 2**31
    offs_n = start + tl.arange(0, BLOCK_N)
    BITS: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth
    if start + BLOCK_N <= N:  # without a mask the accesses stay 16 bytes wide whatever N is
        x = tl.load(x_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + offs_n, activated(x, ACT, BITS).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + offs_n, activated(x, ACT, BITS).to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _activation_bwd(x_ptr, dy_ptr, dx_ptr, N, ACT: tl.constexpr, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= N:
        x = tl.load(x_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        _, dx = pulled_back(x, dy, ACT)
        tl.store(dx_ptr + offs_n, dx.to(dx_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        _, dx = pulled_back(x, dy, ACT)
        tl.store(dx_ptr + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _bias_activation_fwd(
    x_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    ACT: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    start_m, start_n = tile(BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    offs = offs_m * N + offs_n
    mask = None if FILLED else (offs_m < M) & (offs_n < N)
    bias = tl.load(bias_ptr + offs_n, mask=None if FILLED else offs_n < N).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32) + bias
    y = activated(x, ACT, y_ptr.dtype.element_ty.primitive_bitwidth)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bias_activation_bwd(
    x_ptr,
    bias_ptr,
    dy_ptr,
    dx_ptr,
    part_ptr,
    M,
    N,
    ACT: tl.constexpr,
    FILLED: tl.constexpr,
    LEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program takes rows of its columns at a fixed distance, so that all of them together go through memory from its
    start to its end, and leaves the sum of their gradients in part [programs, N]."""
    let_follow(LEADS)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    columns = None if FILLED else offs_n < N
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=columns).to(tl.float32)
    piece = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for m in range(piece * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)[:, None]
        offs = offs_m * N + offs_n
        mask = None if FILLED else (offs_m < M) & columns
        x = tl.load(x_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        if bias_ptr is not None:
            x += bias
        _, dx = pulled_back(x, dy, ACT)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += dx if FILLED else tl.where(mask, dx, 0.0)
    tl.store(part_ptr + piece * N + offs_n, tl.sum(total, axis=0)[None, :], mask=columns)


_launch_fwd = Launcher(_activation_fwd)
_launch_bwd = Launcher(_activation_bwd)
_launch_bias_fwd = Launcher(_bias_activation_fwd)
_launch_bias_bwd = Launcher(_bias_activation_bwd)


def _default(form: str, *rest: object) -> dict[str, int]:
    config = {"block": 2048, "num_warps": 4}
    if form == "bias-fwd":
        return config | ({"block": 1024, "columns": 512} if rest[-1] == "small" else {"columns": 1024})
    if form == "bias-bwd":
        return {"block": 1024, "columns": 1024, "programs": 1056, "num_warps": 8}
    return config


def _choices(form: str, *_: object) -> list[dict[str, int]]:
    blocks = [{"block": block, "num_warps": warps} for block in (1024, 2048, 4096, 8192) for warps in (4, 8)]
    if form == "bias-fwd":
        some = ({"block": 512, "num_warps": 4}, blocks[0], *blocks[2:6])
        found = [config | {"columns": columns} for config in some for columns in (256, 512, 1024, 2048)]
        return [config for config in found if config["columns"] <= config["block"]]
    if form == "bias-bwd":  # 1056 of 8 warps fill an H200 once
        shapes = [(1024, 1024, 8), (1024, 1024, 4), (2048, 256, 4), (2048, 2048, 4), (2048, 1024, 4), (2048, 1024, 8)]
        return [
            {"block": block, "columns": columns, "programs": programs, "num_warps": warps}
            for block, columns, warps in shapes
            for programs in (528, 1056, 2112)
        ]
    return blocks


CONFIG = Tuned("activation.json", _default, _choices)


def _several_rows(config: dict[str, int], N: int) -> tuple[int, int]:
    """The shape of a tile: several rows, so that a bias that was loaded serves more than once."""
    columns = min(config["columns"], next_power_of_2(N))
    return config["block"] // columns, columns


LAUNCHERS = {"fwd": _launch_fwd, "bwd": _launch_bwd}


@planned
def _plan(direction: str, act: str, N: int, device: int, dtype: torch.dtype, _: torch.dtype | None = None) -> Prepared:
    """How x becomes y or, with dy, of whatever dtype, dx."""
    config = CONFIG(device, direction, act, dtype.itemsize, bucket(N))
    block, warps = config["block"], config["num_warps"]
    return LAUNCHERS[direction].prepare((cdiv(N, block),), N, ACT=act, BLOCK_N=block, num_warps=warps)


@planned
def _plan_bias(act: str, M: int, N: int, device: int, dtype: torch.dtype, _: torch.dtype) -> Prepared:
    """How x and a bias, of whatever dtype, become y."""
    config = CONFIG(device, "bias-fwd", act, dtype.itemsize, bucket(M * N))
    BLOCK_M, BLOCK_N = _several_rows(config, N)
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": config["num_warps"]}
    grid = across, down, steps = tiles(M, N, BLOCK_M, BLOCK_N)
    filled = across * BLOCK_N == N and down * steps * BLOCK_M == M
    return _launch_bias_fwd.prepare(grid, M, N, ACT=act, FILLED=filled, **blocks)


def _activate(x: Tensor, y: Tensor, act: str) -> None:
    _plan("fwd", act, x.numel(), x.get_device(), x.dtype)(x, y)


def _add_and_activate(x: Tensor, bias: Tensor, y: Tensor, act: str) -> None:
    N = bias.numel()
    _plan_bias(act, x.numel() // N, N, x.get_device(), x.dtype, bias.dtype)(x, bias, y)


@operator("activation", fake=contiguous_like)
def activation(x: Tensor, act: str) -> Tensor:
    """The named activation of every element."""
    y = contiguous_like(x)
    if x.numel():
        _activate(x.contiguous(), y, act)
    return y


@operator("activation_backward", fake=contiguous_like)
def activation_backward(x: Tensor, dy: Tensor, act: str) -> Tensor:
    """The gradient of an activation's input from that input and the output's gradient."""
    dx = contiguous_like(x)
    if N := x.numel():
        _plan("bwd", act, N, x.get_device(), x.dtype, dy.dtype)(x.contiguous(), dy.contiguous(), dx)
    return dx


def _save(ctx, inputs, output) -> None:
    x, ctx.act = inputs
    # ReLU's slope can be told from its result, which whoever uses it next keeps anyway.
    ctx.save_for_backward(output if ctx.act == "relu" else x)


def _backward(ctx, dy: Tensor):
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        return _pulled_back_by_torch(x, dy, ctx.act), None
    return activation_backward(x, dy, ctx.act), None


activation.differentiate(_save, _backward)


def _pulled_back_by_torch(x: Tensor, dy: Tensor, act: str) -> Tensor:
    return torch.autograd.grad(FORMULAS[act](x), x, dy, create_graph=True)[0]


@operator("bias_activation", fake=contiguous_like)
def bias_activation(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """The named activation of x [..., N] + bias [N]."""
    y = contiguous_like(x)
    if x.numel():
        _add_and_activate(x.contiguous(), bias.contiguous(), y, act)
    return y


def _bias_gradients(x: Tensor, bias: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), x.new_empty(x.shape[-1])


@operator("bias_activation_backward", fake=_bias_gradients)
def bias_activation_backward(x: Tensor, bias: Tensor | None, dy: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The gradients of input and bias from x [..., N] + bias (or the sum as x) and the output's gradient."""
    dx, dbias = _bias_gradients(x, bias)
    if not x.numel():
        return dx, dbias.zero_()
    given = [None if t is None else t.contiguous() for t in (x, bias, dy)]
    dtypes = x.dtype, None if bias is None else bias.dtype, dy.dtype
    N = x.shape[-1]
    _plan_bias_backward(act, x.numel() // N, N, x.get_device(), *dtypes)(*given, dx, dbias)
    return dx, dbias


@planned
def _plan_bias_backward(
    act: str, M: int, N: int, device: int, dtype: torch.dtype, *_: torch.dtype | None
) -> Callable[..., None]:
    """How x, a bias and dy, of whatever dtypes, become the gradients."""
    config = CONFIG(device, "bias-bwd", act, dtype.itemsize, bucket(M * N))
    BLOCK_M, BLOCK_N = _several_rows(config, N)
    across = cdiv(N, BLOCK_N)
    pieces = min(cdiv(M, BLOCK_M), max(1, config["programs"] // across))  # shapes decide, so sums are always the same
    filled = across * BLOCK_N == N and M % BLOCK_M == 0
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": config["num_warps"]}
    how = {"ACT": act, "FILLED": filled, "LEADS": can_follow(device)}
    pull_back = _launch_bias_bwd.prepare((across, pieces), M, N, **how, **blocks)
    sums = add_up(pieces, N, 1, device)

    def launch(x: Tensor, bias: Tensor | None, dy: Tensor, dx: Tensor, dbias: Tensor) -> None:
        part = x.new_empty(pieces, N, dtype=torch.float32)
        pull_back(x, bias, dy, dx, part)
        sums(part, dbias, None, None)

    return launch


def _bias_save(ctx, inputs, output) -> None:
    x, bias, ctx.act = inputs
    ctx.save_for_backward(*((output, None) if ctx.act == "relu" else (x, bias)))


def _bias_backward(ctx, dy: Tensor):
    x, bias = ctx.saved_tensors
    if torch.is_grad_enabled():
        dx = _pulled_back_by_torch(x if bias is None else x + bias, dy, ctx.act)
        return dx, dx.flatten(0, -2).sum(0) if dx.dim() > 1 else dx, None
    dx, dbias = bias_activation_backward(x, bias, dy, ctx.act)
    return dx if ctx.needs_input_grad[0] else None, dbias if ctx.needs_input_grad[1] else None, None


bias_activation.differentiate(_bias_save, _bias_backward)


@planned
def _way(shape: tuple[int, ...], dtype: torch.dtype, device: int, act: str) -> Callable[[Tensor], Tensor] | None:
    """From x as it lies in memory to its activation; None if that is torch's to do."""
    N = math.prod(shape)
    return filling(_plan("fwd", act, N, device, dtype), shape) if N and dtype in FLOATS else None


def by_ours(smallest: float, input: Any, bias: Any, act: str, *, inplace: bool = False) -> Tensor | None:
    """The activation by our kernels; None if they cannot take it as torch would. Raises where the bias is none."""
    if bias is None and not inplace:
        if not has_at_least(smallest, input):
            return None
        if is_quiet() and is_ready(input):
            way = _way(input.shape, input.dtype, input.get_device(), act)
            return way and way(input)
    return _apply(input, bias, act, inplace) if _fits(smallest, input, bias, inplace) else None


def _fits(smallest: float, input: Any, bias: Any, inplace: bool) -> bool:
    if bias is not None:
        _require_bias(input, bias)
    # Inductor fuses torch's own with its neighbours; it could not look into ours.
    if torch.compiler.is_compiling() or not takes(0 if bias is not None else smallest, input):
        return False
    if bias is None:
        return not inplace or may_change(input)
    return runs_here(input, bias) and (not inplace or may_change(input, bias))


def _require_bias(input: Any, bias: Any) -> None:
    for name, value in (("input", input), ("bias", bias)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a tensor, not {type(value).__name__}")
    if not input.dim() or bias.shape != input.shape[-1:]:
        raise ValueError(f"bias has the size of input's last dimension, {[*input.shape[-1:]]}, not {[*bias.shape]}")


def _apply(input: Tensor, bias: Tensor | None, act: str, inplace: bool) -> Tensor:
    if not inplace:
        return activation(input, act) if bias is None else bias_activation(input, bias, act)
    if input.numel():
        if bias is None:
            _activate(input, input, act)
        else:
            _add_and_activate(input, bias.contiguous(), input, act)
    torch.autograd.graph.increment_version(input)
    return input


def with_bias(input: Tensor, bias: Tensor | None, *, inplace: bool = False) -> Tensor:
    """input + bias by torch."""
    if bias is None:
        return input
    return input.add_(bias) if inplace else input + bias
