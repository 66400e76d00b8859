"""Linear layer with a quantised weight: y = activation(x wᵀ + b), where w = (value(code) - zero) * scale per group.

At decoding a linear layer reads its whole weight for a few rows of x, so a 4-bit weight is up to four times as fast as
a 16-bit one, if it is dequantised in registers, between memory and the tensor cores. With many rows of x the layer is
compute-bound, and dequantising is work that a 16-bit weight does not need.

The truth is the float64 product with the dequantised weight: how far that is from the original weight is another
question, which `tilewright.apply(model, linear=…)` answers for every layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from tilewright.ops.activation._unary import FORMULAS
from tilewright.ops.linear._fp8 import precision_of_sums
from tilewright.ops.quantized import _dynamic, _triton
from tilewright.ops.quantized._formats import BIAS, Parts, dequantize, padded, parse
from tilewright.ops.quantized._loaders import load_quantized
from tilewright.ops.quantized._weight import QuantizedWeight, quantize
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.gpus import has_fp8
from tilewright.runtime.operator import constant_when_compiled, needs_gradient, operator
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["QuantizedWeight", "load_quantized", "quantize", "quantized_linear"]


def reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: Tensor | None,
    bias: Tensor | None,
    format: str,
) -> Tensor:
    fmt = parse(format)
    weight = dequantize(Parts(codes, scale, zero, levels), fmt, x.shape[-1], x.dtype)
    if fmt.quantizes_x:
        x = _dynamic.rounded_activations(x, fmt)
    return F.linear(x, weight, bias)


def cost(x: Tensor, codes: Tensor, *rest: Any) -> Cost:
    (M, K), N, fmt = x.shape, codes.shape[0], parse(rest[-1])
    parts = sum(t.nbytes for t in rest if isinstance(t, Tensor))
    unit = matrix_unit(x.dtype)
    if fmt.quantizes_x:
        unit = "tensor.int8" if fmt.is_integer else "tensor.float8_e4m3fn"
    return Cost(read=x.nbytes + codes.nbytes + parts, written=M * N * x.element_size(), flops={unit: 2 * M * N * K})


def backward_cost(x: Tensor, codes: Tensor, *rest: Any) -> Cost:
    (M, K), N = x.shape, codes.shape[0]
    read = M * N * x.element_size() + codes.nbytes + sum(t.nbytes for t in rest if isinstance(t, Tensor))
    return Cost(read=read, written=x.nbytes, flops={matrix_unit(x.dtype): 2 * M * N * K})


def precision(x: Tensor, *rest: Any) -> float:
    fmt = parse(rest[-1])
    return precision_of_sums(x) if fmt.quantizes_x and not fmt.is_integer else 0.0


def inputs(draw: Draw) -> tuple[Any, ...]:
    """Draw codes and scales instead of weights, so that every code and every padding occurs."""
    fmt, N, K = parse(draw["format"]), draw["N"], draw["K"]
    words = (draw.randint("N", -(-padded(K, fmt) * fmt.bits // 32), high=2**32) - 2**31).to(torch.int32)
    if fmt.values == "e4m3":
        words = words & ~0x01010101  # no code is NaN
    codes = words
    if fmt.quantizes_x:
        codes = words.contiguous().view(torch.int8 if fmt.is_integer else torch.uint8)[:, :K].contiguous()
    shape = fmt.groups(K), fmt.scale_columns(N)
    if fmt.has_e8m0:
        scale = (draw.randint(*shape, high=8) + 120).to(torch.uint8)
    else:
        scale = draw.randn(*shape, scale=2**-4)
        scale = torch.where(scale.isfinite(), scale.abs(), 1.0)
        scale = scale if fmt.group and fmt.rows == 1 else scale.float()
    zero = levels = None
    if fmt.zero:
        steps = 1 if fmt.zero == "integer" else 4
        zero = (draw.randint(*shape, high=steps * 2**fmt.bits) / steps - BIAS[fmt.values]).to(scale.dtype)
    if fmt.values == "nf4":
        levels = draw.randn(16).float()
        levels = torch.where(levels.isfinite(), levels, 0.0)
    bias = draw.randn("N") if draw["bias"] else None
    return draw.randn("M", "K"), codes, scale, zero, levels, bias, fmt.name


op = Op(
    "quantized_linear",
    reference,
    cost,
    inputs=inputs,
    takes=lambda case: 0 not in (case["N"], case["K"]),
    check=points(
        M=(1, 3, 16, 17, 5, 130, 2, 1, 7, 4, 3, 33, 2, 5, 1, 5, 37, 70, 3),
        N=(64, 70, 5, 130, 65, 33, 16, 129, 64, 7, 257, 48, 64, 31, 40, 64, 33, 130, 7),
        K=(128, 300, 1024, 97, 64, 256, 33, 1536, 200, 40, 129, 128, 96, 70, 500, 128, 300, 64, 33),
        format=(
            "int4-g128",
            "int4-g32",
            "int4-g128-zero",
            "int4",
            "int4-g64-float-zero",
            "int8-g32-zero",
            "int8",
            "int4-g64",
            "int8-g128",
            "fp8",
            "fp8-block128",
            "mxfp4",
            "mxfp8",
            "nf4",
            "fp8-tensor",
            "int8-a8",
            "fp8-a8",
            "int8-a8",
            "fp8-a8",
        ),
        bias=(False, True, False, True, False) * 3 + (True, False, True, False),
    ),
    bench=points(
        M=(1, 4, 16, 64, 4096, 1, 16, 1, 16, 1, 16, 1, 16, 1, 16),
        N=(8192, 8192, 8192, 8192, 8192, 14336, 14336, 4096, 4096, 28672, 28672, 8192, 8192, 8192, 8192),
        K=(8192, 8192, 8192, 8192, 8192, 4096, 4096, 14336, 14336, 8192, 8192, 8192, 8192, 8192, 8192),
        format=("int4-g128",) * 11 + ("int8",) * 2 + ("fp8",) * 2,
        bias=(False,) * 15,
    )
    + points(M=(8192, 8192), N=(8192, 8192), K=(8192, 8192), format=("int8-a8", "fp8-a8"), bias=(False, False)),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "intermediate", "K": "hidden"},
    constants=(2, 3, 4),
    precision=precision,
)


@operator("quantized_linear", fake=lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]))
def quantized_linear_forward(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: Tensor | None,
    bias: Tensor | None,
    format: str,
    activation: str,
) -> Tensor:
    """activation(x wᵀ + bias) for x [M, K] and the parts of a weight [N, K] in a format.

    Without an activation it has a gradient for x and the bias.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, codes.shape[0])
    fmt = parse(format)
    parts = Parts(*(t if t is None else t.contiguous() for t in (codes, scale, zero, levels)))  # type: ignore[arg-type]
    x = x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    return (_dynamic if fmt.quantizes_x else _triton).linear(x, parts, bias, fmt, activation)


@operator("dequantize_weight", fake=lambda codes, *rest: codes.new_empty(codes.shape[0], rest[-2], dtype=rest[-1]))
def dequantize_weight(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: Tensor | None,
    format: str,
    K: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [N, K] of the parts of a format, by one kernel: torch takes a dozen, and int64 indices."""
    fmt = parse(format)
    parts = Parts(*(t if t is None else t.contiguous() for t in (codes, scale, zero, levels)))  # type: ignore[arg-type]
    return (dequantize if fmt.quantizes_x else _triton.dequantized)(parts, fmt, K, dtype)


def _save(ctx, inputs, output) -> None:
    x, codes, scale, zero, levels, _, ctx.format, ctx.activation = inputs
    ctx.K = x.shape[1]
    ctx.save_for_backward(codes, scale, zero, levels)


def _backward(ctx, dy: Tensor):
    if ctx.activation != "none":
        raise RuntimeError("the fused activation has no gradient: apply it to the result instead")
    needs_x, *_, needs_bias, _, _ = ctx.needs_input_grad
    return (
        dy @ dequantize_weight(*ctx.saved_tensors, ctx.format, ctx.K, dy.dtype) if needs_x else None,
        *(None, None, None, None),
        dy.sum(0) if needs_bias else None,
    )


quantized_linear_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_linear(x: Tensor, *parts: Any) -> Tensor:
    return quantized_linear_forward(x, *parts, "none")


# Dequantising the weight reads the codes, and writes and reads the weight in the dtype of x; our kernel reads the codes
# alone, once per tile of rows. On an H200 (int4-g128, 8192 columns and rows) it takes half as long with 64 rows, and
# nearly twice as long with 4096. Activations in 8 bits need it with any number of rows: torch multiplies in 16 bits.
LARGEST_ROWS = PerGPU("quantized_linear rows", lambda gpu: _triton.largest_rows(gpu, bits=4, itemsize=2))


@constant_when_compiled  # it cannot trace how it is found, and need not
def _largest_rows(device: int, format: str, dtype: torch.dtype) -> float:
    """Return the largest number of rows of x in this dtype that our kernel takes."""
    fmt = parse(format)
    if fmt.quantizes_x and (fmt.is_integer or has_fp8(device)):
        return math.inf
    return _triton.DECODING if fmt.quantizes_x or dtype == torch.float32 else LARGEST_ROWS[device]


def quantized_linear(
    input: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Linear layer with a weight of `tilewright.quantize` or `load_quantized`, then an activation.

    The gradient is that of `input` and `bias`: the weight is constant, as under LoRA. Our kernel runs up to 128 rows in
    16 bits, or fewer on GPUs with less shared memory, and up to 16 rows in fp32, or any number with quantised
    activations; beyond them the weight is dequantised and multiplied by torch. The activation is None, "relu",
    "relu_squared", "silu", "gelu" or "gelu_tanh".
    """
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}: quantize it first, with tilewright.quantize")
    if activation is not None and activation not in FORMULAS:
        raise ValueError(f"activation must be None or one of {', '.join(FORMULAS)}, not {activation!r}")
    if not isinstance(input, Tensor) or not input.is_floating_point():
        given = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"the input must be a tensor of floats, not {given}")
    N, K = weight.shape
    if input.dim() == 0 or input.shape[-1] != K:
        raise ValueError(f"the input has shape {tuple(input.shape)}, and the weight {N}x{K} takes {K} features")
    if input.device != weight.device:
        raise ValueError(f"the input is on {input.device} and the weight on {weight.device}: move it with .to()")
    rows = input.shape[:-1].numel()
    floats = [input] if bias is None else [input, bias]
    largest_rows = _largest_rows(input.get_device(), weight.format, input.dtype)
    if rows > largest_rows or not eligible(*floats) or (bias is not None and bias.shape != (N,)):
        return _by_torch(input, weight, bias, activation)
    x = input.reshape(rows, K)
    x = x if weight.order is None else x.index_select(1, weight.order)  # type: ignore[arg-type]
    is_fused = activation is not None and not needs_gradient(*floats)
    y = quantized_linear_forward(x, *weight.parts, bias, weight.format, activation if is_fused else "none")
    y = y if activation is None or is_fused else FORMULAS[activation](y)
    return y.view(*input.shape[:-1], N)


def _by_torch(input: Tensor, weight: QuantizedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Dequantise the weight and multiply."""
    fmt = parse(weight.format)
    if fmt.quantizes_x:
        input = _dynamic.rounded_activations(input.reshape(-1, input.shape[-1]), fmt).view(input.shape)
    # A reordered weight and dtypes that kernels do not take are dequantised by torch, whose operations see everything.
    if weight.order is None and eligible(input):
        dense = dequantize_weight(*weight.parts, weight.format, weight.shape[1], input.dtype)
    else:
        dense = weight.dequantize(input.dtype)
    y = F.linear(input, dense, bias)
    return y if activation is None else FORMULAS[activation](y)


@op.public
def public(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, levels: Any, bias: Tensor | None, format: str) -> Tensor:
    weight = QuantizedWeight(format, (codes.shape[0], x.shape[-1]), Parts(codes, scale, zero, levels))
    return quantized_linear(x, weight, bias)
