"""Activations: formulas, Triton kernels with and without a bias, differentiable operators, and the call path."""

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

from tilewright.runtime.configs import ConfigTable, cached_plan
from tilewright.runtime.crossovers import Crossover, always
from tilewright.runtime.elementwise import can_write_in_place, eligible_elementwise, size_bucket, tile_grid, tile_start
from tilewright.runtime.eligibility import FLOATS, Dispatch, TensorKey, eligible, empty_like_options, unary
from tilewright.runtime.gpus import GPUFacts
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.partial_sums import sum_partials
from tilewright.runtime.pdl import has_pdl, launch_dependents
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Op, grid

FORMULAS = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}  # by torch's name for the approximation
FLOPS = {  # (fp32, special function) per element: forward, backward
    "relu": ((1, 0), (2, 0)),
    "relu_squared": ((2, 0), (4, 0)),
    "silu": ((4, 1), (7, 1)),
    "gelu": ((20, 1), (24, 1)),
    "gelu_tanh": ((8, 1), (18, 1)),
}


def flops(act: str, elements: int, *, backward: bool = False, more: int = 0) -> dict[str, float]:
    """Return the operations of an activation by unit, with `more` fp32 operations per element."""
    fp32, special = FLOPS[act][backward]
    return {"fp32": (fp32 + more) * elements, "special": special * elements}


@triton.jit
def _normal_tail(x):
    """Return P(Z < -|x|) for a normal Z, and exp(-x^2 / 2)."""
    t = libdevice.fast_dividef(1.0, 1.0 + tl.abs(0.336 * x))  # the quotient is zero from 2**126 on
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
def _normal_tail_16bit(x):
    """Return P(Z < -|x|) to 13 bits, more than 16-bit results hold, in fewer steps."""
    u = 0.8493218 * x  # the root of log2(e) / 2, so that the bell is exp2(-u^2)
    t = libdevice.fast_dividef(1.0, 1.8070677 + tl.abs(u))
    p = -1.3434764 * t + 1.7267687
    p = p * t + 0.45359511
    p = p * t + 0.35207696
    p = p * t - 4.0703637e-4
    return tl.exp2(u * (u * -1.0)) * p


@triton.jit
def _tanh_odds(x):
    """Return log2(s / (1 - s)), where gelu = x s."""
    return x * (2.3022082 + 0.10294324 * (x * x))


@triton.jit
def _gelu_parts(x):
    """Return s, where gelu = x s, and the derivative of gelu."""
    tail, bell = _normal_tail(x)
    s = tl.where(x > 0, 1.0 - tail, tail)
    return s, s + 0.39894228 * (x * bell)


@triton.jit
def _gelu_tanh_parts(x):
    odds = _tanh_odds(x)
    e = tl.exp2(tl.abs(odds) * -1.0)
    larger = libdevice.fast_dividef(1.0, 1.0 + e)  # the larger of s and 1 - s
    s = tl.where(odds > 0, larger, e * larger)
    near = tl.minimum(tl.maximum(x, -16.0), 16.0)  # beyond, e is zero
    return s, s + e * larger * larger * near * (1.5957691 + 0.21406445 * (near * near))


@triton.jit
def activation_of(x, ACT: tl.constexpr, BITS: tl.constexpr = 32):
    """Return the activation of fp32 values, accurate enough for results of BITS bits."""
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
        tail = _normal_tail_16bit(x)
        return x * tl.where(x > 0, 1.0 - tail, tail)
    else:
        s, _ = _gelu_parts(x)
        return x * s


@triton.jit
def activation_grad(x, dy, ACT: tl.constexpr):
    """Return the activation of fp32 values, and their gradient from that of the result."""
    if ACT == "relu":
        return activation_of(x, ACT), tl.where(x <= 0, 0.0, dy)
    elif ACT == "relu_squared":
        return activation_of(x, ACT), tl.where(x <= 0, 0.0, 2.0 * x * dy)
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
    start = tl.program_id(0).to(tl.int64) * BLOCK_N  # int64: N may exceed 2**31
    offs_n = start + tl.arange(0, BLOCK_N)
    BITS: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth
    if start + BLOCK_N <= N:  # without a mask accesses are 16 bytes wide whatever N is
        x = tl.load(x_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + offs_n, activation_of(x, ACT, BITS).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + offs_n, activation_of(x, ACT, BITS).to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _activation_bwd(x_ptr, dy_ptr, dx_ptr, N, ACT: tl.constexpr, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= N:
        x = tl.load(x_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        _, dx = activation_grad(x, dy, ACT)
        tl.store(dx_ptr + offs_n, dx.to(dx_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        _, dx = activation_grad(x, dy, ACT)
        tl.store(dx_ptr + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _bias_activation_fwd(
    x_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    start_m, start_n = tile_start(BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    offs = offs_m * N + offs_n
    mask = None if EVEN else (offs_m < M) & (offs_n < N)
    bias = tl.load(bias_ptr + offs_n, mask=None if EVEN else offs_n < N).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32) + bias
    y = activation_of(x, ACT, y_ptr.dtype.element_ty.primitive_bitwidth)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bias_activation_bwd(
    x_ptr,
    bias_ptr,
    dy_ptr,
    dx_ptr,
    partials_ptr,
    M,
    N,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write dx, and the sum of a program's rows of it to partials [programs, N].

    A program strides over the rows of its columns, so that all programs move through memory together.
    """
    launch_dependents(PDL)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    columns = None if EVEN else offs_n < N
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=columns).to(tl.float32)
    split = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for m in range(split * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)[:, None]
        offs = offs_m * N + offs_n
        mask = None if EVEN else (offs_m < M) & columns
        x = tl.load(x_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
        if bias_ptr is not None:
            x += bias
        _, dx = activation_grad(x, dy, ACT)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += dx if EVEN else tl.where(mask, dx, 0.0)
    tl.store(partials_ptr + split * N + offs_n, tl.sum(total, axis=0)[None, :], mask=columns)


_launch_fwd = Launcher(_activation_fwd)
_launch_bwd = Launcher(_activation_bwd)
_launch_bias_fwd = Launcher(_bias_activation_fwd)
_launch_bias_bwd = Launcher(_bias_activation_bwd)


def _default(gpu: GPUFacts, form: str, *rest: object) -> dict[str, int]:
    config = {"block": 2048, "num_warps": 4}
    if form == "bias-fwd":
        return config | ({"block": 1024, "columns": 512} if rest[-1] == "small" else {"columns": 1024})
    if form == "bias-bwd":
        return {"block": 1024, "columns": 1024, "programs": 8 * gpu.sms, "num_warps": 8}
    return config


def _choices(gpu: GPUFacts, form: str, *_: object) -> list[dict[str, int]]:
    blocks = [{"block": block, "num_warps": warps} for block in (1024, 2048, 4096, 8192) for warps in (4, 8)]
    if form == "bias-fwd":
        some = ({"block": 512, "num_warps": 4}, blocks[0], *blocks[2:6])
        found = [config | {"columns": columns} for config in some for columns in (256, 512, 1024, 2048)]
        return [config for config in found if config["columns"] <= config["block"]]
    if form == "bias-bwd":  # 8 programs of 8 warps are what a multiprocessor holds
        shapes = [(1024, 1024, 8), (1024, 1024, 4), (2048, 256, 4), (2048, 2048, 4), (2048, 1024, 4), (2048, 1024, 8)]
        return [
            {"block": block, "columns": columns, "programs": programs, "num_warps": warps}
            for block, columns, warps in shapes
            for programs in (4 * gpu.sms, 8 * gpu.sms, 16 * gpu.sms)
        ]
    return blocks


CONFIG = ConfigTable("activation.json", _default, _choices, takes_gpu=True)


def _tile_rows(config: dict[str, int], N: int) -> tuple[int, int]:
    """Return the shape of a tile: several rows, so that one load of the bias serves all of them."""
    columns = min(config["columns"], next_power_of_2(N))
    return config["block"] // columns, columns


LAUNCHERS = {"fwd": _launch_fwd, "bwd": _launch_bwd}


@cached_plan
def _plan(
    direction: str, act: str, N: int, device: int, dtype: torch.dtype, _: torch.dtype | None = None
) -> PreparedLaunch:
    """Return the launch that takes x and y, or x, dy (of the last dtype) and dx."""
    config = CONFIG(device, direction, act, dtype.itemsize, size_bucket(N))
    block, warps = config["block"], config["num_warps"]
    return LAUNCHERS[direction].prepare((cdiv(N, block),), N, ACT=act, BLOCK_N=block, num_warps=warps)


@cached_plan
def _plan_bias(act: str, M: int, N: int, device: int, dtype: torch.dtype, _: torch.dtype) -> PreparedLaunch:
    """Return the launch that takes x, the bias (of the last dtype) and y."""
    config = CONFIG(device, "bias-fwd", act, dtype.itemsize, size_bucket(M * N))
    BLOCK_M, BLOCK_N = _tile_rows(config, N)
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": config["num_warps"]}
    grid = across, down, steps = tile_grid(M, N, BLOCK_M, BLOCK_N)
    filled = across * BLOCK_N == N and down * steps * BLOCK_M == M
    return _launch_bias_fwd.prepare(grid, M, N, ACT=act, EVEN=filled, **blocks)


def _activate(x: Tensor, y: Tensor, act: str) -> None:
    _plan("fwd", act, x.numel(), x.get_device(), x.dtype)(x, y)


def _add_and_activate(x: Tensor, bias: Tensor, y: Tensor, act: str) -> None:
    N = bias.numel()
    _plan_bias(act, x.numel() // N, N, x.get_device(), x.dtype, bias.dtype)(x, bias, y)


@operator("activation", fake=contiguous_like)
def activation(x: Tensor, act: str) -> Tensor:
    """The activation of every element."""
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
    # ReLU's derivative follows from its result, which the next layer keeps anyway.
    ctx.save_for_backward(output if ctx.act == "relu" else x)


def _backward(ctx, dy: Tensor):
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        return _gradient_by_torch(x, dy, ctx.act)
    return activation_backward(x, dy, ctx.act)


activation.differentiate(_save, _backward)


def _gradient_by_torch(x: Tensor, dy: Tensor, act: str) -> Tensor:
    return torch.autograd.grad(FORMULAS[act](x), x, dy, create_graph=True)[0]


@operator("bias_activation", fake=contiguous_like)
def bias_activation(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """The activation of x [..., N] + bias [N]."""
    y = contiguous_like(x)
    if x.numel():
        _add_and_activate(x.contiguous(), bias.contiguous(), y, act)
    return y


def _bias_gradients(x: Tensor, bias: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), x.new_empty(x.shape[-1])


@operator("bias_activation_backward", fake=_bias_gradients)
def bias_activation_backward(x: Tensor, bias: Tensor | None, dy: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The gradients of input and bias, from x and bias (or their sum as x, without bias) and the output's gradient."""
    dx, dbias = _bias_gradients(x, bias)
    if not x.numel():
        return dx, dbias.zero_()
    given = [None if t is None else t.contiguous() for t in (x, bias, dy)]
    dtypes = x.dtype, None if bias is None else bias.dtype, dy.dtype
    N = x.shape[-1]
    _plan_bias_backward(act, x.numel() // N, N, x.get_device(), *dtypes)(*given, dx, dbias)
    return dx, dbias


@cached_plan
def _plan_bias_backward(
    act: str, M: int, N: int, device: int, dtype: torch.dtype, *_: torch.dtype | None
) -> Callable[..., None]:
    """Return the function that takes x, bias, dy (of the given dtypes), dx and dbias."""
    config = CONFIG(device, "bias-bwd", act, dtype.itemsize, size_bucket(M * N))
    BLOCK_M, BLOCK_N = _tile_rows(config, N)
    across = cdiv(N, BLOCK_N)
    splits = min(
        cdiv(M, BLOCK_M), max(1, config["programs"] // across)
    )  # shapes alone decide: results are deterministic
    filled = across * BLOCK_N == N and M % BLOCK_M == 0
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": config["num_warps"]}
    how = {"ACT": act, "EVEN": filled, "PDL": has_pdl(device)}
    backward = _launch_bias_bwd.prepare((across, splits), M, N, **how, **blocks)
    add_partials = sum_partials(splits, N, 1, device)

    def launch(x: Tensor, bias: Tensor | None, dy: Tensor, dx: Tensor, dbias: Tensor) -> None:
        partials = x.new_empty(splits, N, dtype=torch.float32)
        backward(x, bias, dy, dx, partials)
        add_partials(partials, dbias, None, None)

    return launch


def _bias_save(ctx, inputs, output) -> None:
    x, bias, ctx.act = inputs
    ctx.save_for_backward(*((output, None) if ctx.act == "relu" else (x, bias)))


def _bias_backward(ctx, dy: Tensor):
    x, bias = ctx.saved_tensors
    if torch.is_grad_enabled():
        dx = _gradient_by_torch(x if bias is None else x + bias, dy, ctx.act)
        return dx, dx.flatten(0, -2).sum(0) if dx.dim() > 1 else dx
    dx, dbias = bias_activation_backward(x, bias, dy, ctx.act)
    return dx if ctx.needs_input_grad[0] else None, dbias if ctx.needs_input_grad[1] else None


bias_activation.differentiate(_bias_save, _bias_backward)


@cached_plan
def _plan_call(act: str, x: TensorKey, bias: TensorKey | None = None) -> Callable[..., Tensor] | None:
    shape, dtype, device = x
    if bias is not None:
        _require_bias_shape(shape, bias[0])
    elements, options = math.prod(shape), empty_like_options(shape)
    if not elements or dtype not in FLOATS or (bias is not None and bias[1:] != (dtype, device)):
        return None
    if bias is None:
        return unary(_plan("fwd", act, elements, device, dtype), shape)
    launch = _plan_bias(act, elements // shape[-1], shape[-1], device, dtype, dtype)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        y = torch.empty_like(x, **options)
        launch(x, bias, y)
        return y

    return run


def _call(act: str, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if bias is not None:
        require_bias(x, bias)
    if not _is_eligible(x, bias):
        return None
    return activation(x, act) if bias is None else bias_activation(x, bias, act)


def _is_eligible(x: Tensor, bias: Tensor | None) -> bool:
    # Inductor fuses torch's own activation with its neighbors; it cannot look into ours.
    return not torch.compiler.is_compiling() and eligible_elementwise(None, x) and (bias is None or eligible(x, bias))


dispatch = Dispatch(_plan_call, _call)
BIAS_CROSSOVER = Crossover("bias_activation", always)


def activate_in_place(crossover: Crossover, act: str, x: Any, bias: Any) -> Tensor | None:
    """Write the activation of x + bias to x; return x, or None for torch."""
    if bias is not None:
        require_bias(x, bias)
    if not isinstance(x, Tensor):
        return None
    device, size = x.get_device(), x.numel()
    if not crossover.reached(size, device) or not _is_eligible(x, bias):
        return None
    if not can_write_in_place(x, *(() if bias is None else (bias,))):
        return None
    if x.numel():
        if bias is None:
            _activate(x, x, act)
        else:
            _add_and_activate(x, bias.contiguous(), x, act)
    torch.autograd.graph.increment_version(x)
    return x


def require_bias(input: Any, bias: Any) -> None:
    """Raise unless the bias can be added to the last dimension of the input."""
    for name, value in (("input", input), ("bias", bias)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    _require_bias_shape(input.shape, bias.shape)


def _require_bias_shape(shape: torch.Size, bias: torch.Size) -> None:
    if not shape or bias != shape[-1:]:
        raise ValueError(f"bias must have the size of input's last dimension, {[*shape[-1:]]}, not {[*bias]}")


def with_bias(input: Tensor, bias: Tensor | None, *, inplace: bool = False) -> Tensor:
    """Return input + bias by torch."""
    if bias is None:
        return input
    require_bias(input, bias)
    return input.add_(bias) if inplace else input + bias


def activation_op(name: str, reference: Callable[..., Tensor], **more: Any) -> Op:
    """Return the Op of an activation of one tensor; `more` replaces what differs."""

    def cost(x: Tensor) -> Cost:
        return Cost(read=x.nbytes, written=x.nbytes, flops=flops(name, x.numel()))

    def backward_cost(x: Tensor) -> Cost:
        return Cost(read=2 * x.nbytes, written=x.nbytes, flops=flops(name, x.numel(), backward=True))

    shared: dict[str, Any] = {
        "inputs": lambda draw: (draw.randn("N"),),
        "check": grid(N=(1, 781, 4096, 50021)),
        "bench": grid(N=(2**20, 2**24, 2**28)),
        "batch": "N",
    }
    return Op(name, reference, cost, backward_cost=backward_cost, **shared | more)
