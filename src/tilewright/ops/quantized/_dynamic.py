"""Triton kernels of a linear layer whose activations are quantised per token to the values of the weight's codes.

It multiplies two matrices of codes, both stored row by row, on int8 or fp8 tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.activation._unary import activation_of
from tilewright.ops.quantized._formats import LARGEST, Format, Parts, parse
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.gpus import GPUFacts, has_fp8
from tilewright.runtime.launch import Launcher
from tilewright.runtime.sizes import cdiv, next_power_of_2

TINY = 1e-30  # rows of smaller values are quantised as if this were their largest magnitude


def rounded_activations(x: Tensor, fmt: Format) -> Tensor:
    """Return x [M, K] as the codes of its rows represent it, with the gradient of the identity.

    The codes are computed in fp32, whatever the dtype, and a row with an infinity or NaN becomes NaN.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    narrow = x.detach().float()
    codes, scale = quantized_rows(narrow, fmt)
    values = codes.to(wide) if fmt.is_integer else codes.view(torch.float8_e4m3fn).float().to(wide)
    rounded = (values * scale.to(wide)[:, None]).to(x.dtype)
    return rounded + (x - x.detach()) if x.requires_grad else rounded


def quantized_rows(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return codes [M, K] and fp32 scales [M] of fp32 rows."""
    largest = LARGEST[fmt.values]
    amax = x.abs().amax(-1)
    is_finite = amax < float("inf")
    amax = torch.where(is_finite, amax, 1.0).clamp(min=TINY)
    scale = torch.where(is_finite, amax / largest, float("nan"))
    scaled = torch.where(is_finite[:, None], x, 0.0) * (largest / amax)[:, None]
    if fmt.is_integer:
        return scaled.round().to(torch.int8), scale
    return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8), scale


@triton.jit
def _rounded(x):
    """Return fp32 values below 2^22 rounded to the nearest even integer, as int32."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 2^23, where the last place is 1


@triton.jit
def _e4m3(x):
    """Return the e4m3 codes of fp32 values, rounded to nearest even; many GPUs cannot convert them."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 120, the difference of the biases, in the exponent
    subnormal = _rounded(magnitude * 512.0)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(magnitude < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _quantize_rows(x_ptr, codes_ptr, scale_ptr, stride_xm, K, LARGEST: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    largest = tl.zeros([BLOCK_K], tl.float32)
    odd = tl.zeros([BLOCK_K], tl.int32)  # infinities and NaN
    for start_k in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + row * stride_xm + start_k + offs_k, mask=start_k + offs_k < K, other=0.0).to(tl.float32)
        is_finite = tl.abs(x) < float("inf")
        largest = tl.maximum(largest, tl.where(is_finite, tl.abs(x), 0.0))
        odd += tl.where(is_finite, 0, 1)
    is_finite = tl.sum(odd, 0) == 0
    amax = tl.maximum(tl.max(largest, 0), 1e-30)
    code = tl.full([], LARGEST, tl.float32)  # the code of the largest magnitude
    inverse = tl.div_rn(code, amax)
    tl.store(scale_ptr + row, tl.where(is_finite, tl.div_rn(amax, code), float("nan")))
    for start_k in range(0, K, BLOCK_K):
        inside = start_k + offs_k < K
        x = tl.load(x_ptr + row * stride_xm + start_k + offs_k, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(is_finite, x, 0.0) * inverse
        codes = _rounded(x).to(tl.int8) if LARGEST == 127.0 else _e4m3(x)
        tl.store(codes_ptr + row * K + start_k + offs_k, codes, mask=inside)


@triton.jit
def _wide_e4m3(codes):
    """Return the values of e4m3 codes as fp16, where the GPU has no fp8 tensor cores."""
    codes = codes.to(tl.int16)
    bits = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0  # 2^8, the difference of the biases


@triton.jit
def _scaled_matmul(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, M, N, K,
    KIND: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y; KIND is int8, fp8, or fp16 for e4m3 codes."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (offs_m % M).to(tl.int64)[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + (offs_n % N).to(tl.int64)[None, :] * K + offs_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if KIND == "int8" else tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(x_ptrs), tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(offs_k < K - start_k)[None, :], other=0.0 if KIND == "fp8" else 0)
            w = tl.load(w_ptrs, mask=(offs_k < K - start_k)[:, None], other=0.0 if KIND == "fp8" else 0)
        if KIND == "int8":
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        elif KIND == "fp8":  # the sums of BLOCK_K columns are added in fp32, since Hopper's tensor cores keep 13 bits
            acc += tl.dot(x, w)
        else:
            acc = tl.dot(_wide_e4m3(x), _wide_e4m3(w), acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    x_scale = tl.load(x_scale_ptr + offs_m, mask=offs_m < M, other=0.0)
    w_scale = tl.load(w_scale_ptr + offs_n, mask=offs_n < N, other=0.0)
    y = acc.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "none":
        y = activation_of(y, ACTIVATION, y_ptr.dtype.element_ty.primitive_bitwidth)
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def _default_config(gpu: GPUFacts, rows: int, N: int, K: int, kind: str) -> Config:
    """Return the configuration for up to `rows` rows of x.

    With 128 rows, the sums and the product of one step in fp8 leave registers for one program per SM, and room for
    another stage.
    """
    block_m, block_n, warps = (16, 64, 4) if rows <= 16 else (64, 64, 4) if rows <= 256 else (128, 128, 8)
    wanted = 4 if kind == "fp8" and block_m == 128 else 3
    stages = max(1, min(wanted, gpu.shared_per_block // ((block_m + block_n) * 128)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 128, "num_warps": warps, "num_stages": stages}


def _choices(gpu: GPUFacts, rows: int, N: int, K: int, kind: str) -> list[Config]:
    tiles = ((16, 32, 4), (16, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (128, 256, 8))
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "num_warps": warps, "num_stages": stages}
        for m, n, warps in tiles
        for stages in (3, 4)
        if stages * (m + n) * 128 <= gpu.shared_per_block
    ]


CONFIGS = ConfigTable("quantized_linear_dynamic.json", _default_config, _choices, takes_gpu=True)
ROW_BLOCK = 1024
_launch_rows, _launch_matmul = Launcher(_quantize_rows), Launcher(_scaled_matmul)


@cached_plan
def _plan(
    sizes: tuple[int, int, int],
    stride: int,
    dtype: torch.dtype,
    scale: torch.dtype,
    device: int,
    name: str,
    activation: str,
    native: bool,
    has_bias: bool,
) -> tuple[Any, Any]:
    """Return the launches that quantise rows and that multiply the codes."""
    M, N, K = sizes
    fmt = parse(name)
    kind = "int8" if fmt.is_integer else "fp8" if native else "fp16"
    config = CONFIGS(device, max(16, next_power_of_2(min(M, 4096))), N, K, kind)
    block_k = min(ROW_BLOCK, next_power_of_2(K))
    rows = _launch_rows.prepare((M,), stride, K, LARGEST=LARGEST[fmt.values], BLOCK_K=block_k, num_warps=4)
    tiles = cdiv(M, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"])
    even = K % config["BLOCK_K"] == 0
    product = _launch_matmul.prepare((tiles,), M, N, K, KIND=kind, EVEN_K=even, ACTIVATION=activation, **config)
    return rows, product


def linear(x: Tensor, parts: Parts, bias: Tensor | None, fmt: Format, activation: str) -> Tensor:
    """Return activation(x̂ wᵀ + bias) for x [M, K] whose rows are contiguous, where x̂ are its quantised rows."""
    (M, K), N, device = x.shape, parts.codes.shape[0], x.get_device()
    native = has_fp8(device)
    codes = x.new_empty(M, K, dtype=parts.codes.dtype)
    scale, y = x.new_empty(M, dtype=torch.float32), x.new_empty(M, N)
    rows, product = _plan(
        (M, N, K), x.stride(0), x.dtype, parts.scale.dtype, device, fmt.name, activation, native,
        bias is not None,
    )  # fmt: skip
    rows(x, codes, scale)
    # Loads of bytes would pass through registers to become fp8: those of fp8 go from memory to the tensor cores.
    dtype = torch.float8_e4m3fn if native and not fmt.is_integer else codes.dtype
    product(codes.view(dtype), parts.codes.view(dtype), scale, parts.scale, bias, y)
    return y
