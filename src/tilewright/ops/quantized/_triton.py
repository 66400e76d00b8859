"""Triton kernels of a linear layer with a quantised weight and 16-bit or fp32 activations.

The weight is the first operand of the product, yᵀ = w xᵀ: the tensor cores then read it from registers, where it is
dequantised, and the few columns of xᵀ at decoding fill the short side of their tile. The order of the packed codes
(`_formats.py`) makes the dequantised tile the fragment that a thread needs, without shuffles and without shared memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.activation._unary import activation_of
from tilewright.ops.quantized._formats import WORDS, Format, Parts, parse
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.gpus import GPUFacts
from tilewright.runtime.launch import Launcher
from tilewright.runtime.pdl import dependent_launch, has_pdl, launch_dependents, wait_for_previous
from tilewright.runtime.sizes import cdiv, next_power_of_2


@triton.jit
def _decode(codes, levels_ptr, VALUES: tl.constexpr):
    """Return the fp32 values of int32 codes. Bits are moved into a float: converting integers is slower."""
    if VALUES == "int4":
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2^23 + 8
    elif VALUES == "int8":
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
    elif VALUES == "e4m3":
        bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, the difference of the biases
    elif VALUES == "e2m1":
        bits = ((codes & 7) << 22) | ((codes & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    else:
        return tl.load(levels_ptr + codes)


@triton.jit
def _scale_of(stored):
    """Return scales in fp32; bytes are the exponents of powers of two."""
    if stored.dtype == tl.uint8:
        exponent = stored.to(tl.int32)
        return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def _pairs_of_4_bits(words, DTYPE: tl.constexpr, IS_BF16: tl.constexpr):
    """Return 16-bit floats 2^m + code [BLOCK_N, 16, 2, 2, 2], where the last place of 2^m is 1.

    Two codes are masked and made floats at once.
    """
    magic = 0x43004300 if IS_BF16 else 0x64006400
    pairs = tl.join(
        tl.join((words & 0x000F000F) | magic, ((words >> 8) & 0x000F000F) | magic),
        tl.join(((words >> 4) & 0x000F000F) | magic, ((words >> 12) & 0x000F000F) | magic),
    )
    low = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _pairs_of_e4m3(words, DTYPE: tl.constexpr, IS_BF16: tl.constexpr):
    """Return the values of e4m3 codes as 16-bit floats [BLOCK_N, 16, 2, 2], which hold them all.

    Two codes at once are moved to the high bytes of two floats, and their exponents and mantissas to those of a float.
    """
    pairs = tl.join(
        ((words << 8) & 0xFF00) | ((words << 16) & -0x1000000), ((words >> 8) & 0xFF00) | (words & -0x1000000)
    )
    magnitude = (pairs >> (4 if IS_BF16 else 1)) & (0x07F007F0 if IS_BF16 else 0x3F803F80)
    pairs = (pairs & -0x7FFF8000) | magnitude
    low = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    scale = 1.329227995784916e36 if IS_BF16 else 256.0  # 2^120 or 2^8, the difference of the biases
    return (tl.join(low, high) * scale).to(DTYPE)


@triton.jit
def _codes(words, BITS: tl.constexpr):
    """Return codes as int32, [BLOCK_N, 16, 2, 2, 2] for 4 bits and [BLOCK_N, 16, 2, 2] for 8."""
    if BITS == 4:
        blocks = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12))
        return tl.join(blocks & 15, (blocks >> 16) & 15)
    else:
        blocks = tl.join(words, words >> 16)
        return tl.join(blocks & 255, (blocks >> 8) & 255)


@triton.jit
def _load_groups(
    ptr, columns, start_k, groups, stride,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Load the scales of a chunk, one per row or one per row and word, as [BLOCK_N, lane, word, block, half]."""
    if GROUP == 0:
        return tl.load(ptr + columns).reshape(BLOCK_N, 1, 1, 1, 1)
    elif GROUP % CHUNK == 0:
        return tl.load(ptr + (start_k // GROUP) * stride + columns).reshape(BLOCK_N, 1, 1, 1, 1)
    else:
        offs_g = tl.minimum((start_k + tl.arange(0, 4) * (CHUNK // 4)) // GROUP, groups - 1)
        return tl.load(ptr + offs_g[None, :] * stride + columns[:, None]).reshape(BLOCK_N, 1, 4, 1, 1)


@triton.jit
def _dequantize(
    words, scale_ptr, zero_ptr, levels_ptr, columns, start_k, groups, stride_scale,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr,
    NARROW: tl.constexpr, DTYPE: tl.constexpr, IS_BF16: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return the weights [BLOCK_N, CHUNK] of words [BLOCK_N, 16], multiplied by their scales if SCALED.

    With NARROW the arithmetic is that of DTYPE, in which only the product with the scale rounds.
    """
    BLOCKS: tl.constexpr = CHUNK // 32
    if NARROW:
        w = _pairs_of_4_bits(words, DTYPE, IS_BF16).reshape(BLOCK_N, 4, 4, BLOCKS, 2)  # row, lane, word, block, half
        base = 136.0 if IS_BF16 else 1032.0  # 2^m + 8
        if zero_ptr is None:
            w = (w - base).to(DTYPE)
        else:
            zero = _load_groups(zero_ptr, columns, start_k, groups, stride_scale, BLOCK_N, CHUNK, GROUP)
            w = (w - (zero + base).to(DTYPE)).to(DTYPE)
    elif VALUES == "e4m3" and DTYPE.primitive_bitwidth == 16 and not SCALED:  # pyright: ignore
        w = _pairs_of_e4m3(words, DTYPE, IS_BF16).reshape(BLOCK_N, 4, 4, BLOCKS, 2)
    else:
        w = _decode(_codes(words, 512 // CHUNK), levels_ptr, VALUES).reshape(BLOCK_N, 4, 4, BLOCKS, 2)
        if zero_ptr is not None:
            zero = _load_groups(zero_ptr, columns, start_k, groups, stride_scale, BLOCK_N, CHUNK, GROUP)
            w -= zero.to(tl.float32)
    if SCALED:
        scale = _load_groups(scale_ptr, columns, start_k, groups, stride_scale, BLOCK_N, CHUNK, GROUP)
        w *= scale if NARROW else _scale_of(scale)
    return w.to(DTYPE).permute(0, 2, 3, 1, 4).reshape(BLOCK_N, CHUNK)


SHORT_ROWS = tl.constexpr(64)  # a product: its sums are fewer registers than the weights


@triton.jit
def _quantized_linear_fwd(
    x_ptr, words_ptr, scale_ptr, zero_ptr, levels_ptr, bias_ptr, y_ptr,
    stride_xm, M, N, K, chunks_per_split, groups, scale_columns,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y, or of the partial sums [splits, M, N] of one part of K."""
    launch_dependents(PDL)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tiles_m = tl.cdiv(M, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M  # programs in flight share rows of the weight in L2
    start_n = tl.program_id(0) // tiles_m * BLOCK_N
    chunks = tl.cdiv(K, CHUNK)
    first = tl.program_id(1) * chunks_per_split
    last = tl.minimum(first + chunks_per_split, chunks)

    # Rows of the weight past the end wrap around: they need no masks, and their results are never stored. Those of x
    # are masked: at decoding most of the tile is past the end, and would load as many bytes as the weight.
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    rows_n = (offs_n % N).to(tl.int64)
    columns = rows_n // ROWS if ROWS > 0 else rows_n * 0
    offs_k = tl.arange(0, CHUNK)
    words_ptrs = words_ptr + rows_n[:, None] * (chunks * 16) + first * 16 + tl.arange(0, 16)[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[None, :] * stride_xm + (first * CHUNK + offs_k)[:, None]
    # A scale per row and chunk multiplies the short rows of the product instead of the weights. It is loaded one chunk
    # before: it goes to registers, which the pipeline of the loop does not prefetch.
    SCALES_PRODUCT: tl.constexpr = GROUP > 0 and GROUP % CHUNK == 0 and BLOCK_M <= SHORT_ROWS
    if SCALES_PRODUCT:
        scale = tl.load(scale_ptr + columns + first // (GROUP // CHUNK) * scale_columns)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(first, last):
        start_k = chunk * CHUNK
        if SCALES_PRODUCT:
            following = tl.minimum(chunk + 1, last - 1) // (GROUP // CHUNK)
            next_scale = tl.load(scale_ptr + columns + following * scale_columns)
        words = tl.load(words_ptrs)
        if EVEN_M and EVEN_K:
            x = tl.load(x_ptrs)
        elif EVEN_K:
            x = tl.load(x_ptrs, mask=(offs_m < M)[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=(offs_m < M)[None, :] & (offs_k < K - start_k)[:, None], other=0.0)
        w = _dequantize(
            words, scale_ptr, zero_ptr, levels_ptr, columns, start_k, groups, scale_columns,
            BLOCK_N, CHUNK, VALUES, GROUP, NARROW, DTYPE, x_ptr.dtype.element_ty.is_bf16(),
            GROUP > 0 and not SCALES_PRODUCT,
        )  # fmt: skip
        if SCALES_PRODUCT:
            acc += tl.dot(w, x, input_precision="ieee") * _scale_of(scale)[:, None]
            scale = next_scale
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        words_ptrs += 16
        x_ptrs += CHUNK

    if GROUP == 0:
        acc *= _scale_of(tl.load(scale_ptr + columns))[:, None]
    inside = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    offs = offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]  # [BLOCK_N, BLOCK_M]
    if SPLIT:
        tl.store(y_ptr + tl.program_id(1).to(tl.int64) * M * N + offs, acc, mask=inside)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION != "none":
            acc = activation_of(acc, ACTIVATION, y_ptr.dtype.element_ty.primitive_bitwidth)
        tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_weight(
    words_ptr, scale_ptr, zero_ptr, levels_ptr, w_ptr, N, K, groups, scale_columns,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write one chunk of BLOCK_N rows of the weight [N, K], computed in fp32 and rounded once."""
    chunks = tl.cdiv(K, CHUNK)
    start_k = tl.program_id(0) % chunks * CHUNK
    offs_n = tl.program_id(0) // chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = start_k + tl.arange(0, CHUNK)
    rows = (offs_n % N).to(tl.int64)
    columns = rows // ROWS if ROWS > 0 else rows * 0
    words = tl.load(words_ptr + rows[:, None] * (chunks * 16) + start_k // CHUNK * 16 + tl.arange(0, 16)[None, :])
    w = _dequantize(
        words, scale_ptr, zero_ptr, levels_ptr, columns, start_k, groups, scale_columns,
        BLOCK_N, CHUNK, VALUES, GROUP, False, tl.float32, False, GROUP > 0,
    )  # fmt: skip
    if GROUP == 0:
        w *= _scale_of(tl.load(scale_ptr + columns))[:, None]
    inside = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    tl.store(w_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :], w.to(w_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_splits(
    partials_ptr, bias_ptr, y_ptr, MN, N, splits,
    ACTIVATION: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum partial results [splits, M, N] in order, so that every call returns the same bits, and finish y."""
    wait_for_previous(WAITS)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < MN
    acc = tl.zeros([BLOCK], tl.float32)
    for _ in range(splits):
        acc += tl.load(partials_ptr + offs, mask=inside, other=0.0)
        partials_ptr += MN
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs % N, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        acc = activation_of(acc, ACTIVATION, y_ptr.dtype.element_ty.primitive_bitwidth)
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=inside)


DECODING = 16  # rows of x: the shortest tile
LONGEST_SPLIT = 128  # rows of x: with more, the partial sums are as many bytes as the weight
LARGEST_BLOCK = {4: 16, 2: 128}  # rows of x in a tile, by the bytes of an element
MIN_CHUNKS = 4  # that a program of a split product takes
PROGRAMS_PER_SM = {16: 4, 32: 2, 64: 2, 128: 1}  # splits of a product, by the rows of x in a tile: those that fit
SUM_BLOCK = 512


def _default_config(gpu: GPUFacts, rows: int, N: int, K: int, bits: int, itemsize: int) -> Config:
    """Return the configuration for up to `rows` rows of x.

    A tile of 64 rows of the weight reads as many bytes of x as of 4-bit words with 16 rows of x: with more, it is
    twice as tall.
    """
    block_m = min(rows, LARGEST_BLOCK[itemsize])
    block_n, warps = (32, 4) if itemsize == 4 else (64, 4) if block_m <= DECODING else (128, 8)
    tiles = cdiv(N, block_n) * cdiv(rows, block_m)
    wanted = PROGRAMS_PER_SM[block_m] * gpu.sms // tiles
    splits = 1 if rows > LONGEST_SPLIT else max(1, min(wanted, cdiv(K, 128) // MIN_CHUNKS))
    config = {"BLOCK_M": block_m, "BLOCK_N": block_n, "splits": splits, "num_warps": warps}
    return config | {"num_stages": _stages(gpu, config, bits, itemsize, 2 if itemsize == 4 else 4)}


def largest_rows(gpu: GPUFacts, bits: int, itemsize: int) -> int:
    """Return the largest number of rows of x that one tile takes while the next slice is loaded.

    The weight is then dequantised once, as it is by a kernel of its own, but neither written nor read again.
    """
    blocks = (128, 64, 32, 16)
    block_m = next(n for n in blocks if n <= LARGEST_BLOCK[itemsize])
    fits = lambda n: _default_config(gpu, n, 128, 128, bits, itemsize)["num_stages"] > 1
    return next((n for n in blocks if n <= block_m and fits(n)), DECODING)


def _stages(gpu: GPUFacts, config: Config, bits: int, itemsize: int, wanted: int) -> int:
    """Return as many stages as fit: one slice of x and of the words per stage."""
    per_stage = config["BLOCK_M"] * WORDS * 32 // bits * itemsize + config["BLOCK_N"] * WORDS * 4
    return max(1, min(wanted, gpu.shared_per_block // per_stage - 1))


def _choices(gpu: GPUFacts, rows: int, N: int, K: int, bits: int, itemsize: int) -> list[Config]:
    config = _default_config(gpu, rows, N, K, bits, itemsize)
    found = [
        tile | {"num_stages": _stages(gpu, tile, bits, itemsize, stages)}
        for block_n, warps in ((32, 2), (64, 4), (128, 4), (128, 8))
        for splits in ((1, 2, 4, 8, 16) if rows <= LONGEST_SPLIT else (1,))
        for tile in [config | {"BLOCK_N": block_n, "num_warps": warps, "splits": splits}]
        for stages in (2, 4, 6)
        if splits == 1 or cdiv(K, 128) // splits >= MIN_CHUNKS
    ]
    return [one for n, one in enumerate(found) if one not in found[:n]]


CONFIGS = ConfigTable("quantized_linear.json", _default_config, _choices, takes_gpu=True)
_launch_fwd, _launch_sum = Launcher(_quantized_linear_fwd), Launcher(_sum_splits)
_launch_dequantize = Launcher(_dequantize_weight)
DEQUANTIZED_ROWS = 32


def _narrow(fmt: Format, dtype: torch.dtype, scale: torch.dtype) -> bool:
    """Return whether the 16-bit arithmetic of x rounds the weight once, as `dequantize` does."""
    rounds_once = scale == dtype or not fmt.group
    return fmt.values == "int4" and fmt.zero != "float" and dtype != torch.float32 and rounds_once


@cached_plan
def _plan(
    sizes: tuple[int, int, int], stride: int, dtype: torch.dtype, scale: torch.dtype, device: int, name: str,
    activation: str, has_bias: bool,
) -> tuple[Any, Any, int]:  # fmt: skip
    """Return the launches of the product and of the sum of its splits, and the number of splits."""
    M, N, K = sizes
    fmt = parse(name)
    rows = max(DECODING, next_power_of_2(M)) if M <= 128 else 256
    config = dict(CONFIGS(device, rows, N, K, fmt.bits, dtype.itemsize))
    chunks = cdiv(K, fmt.chunk)
    per_split = cdiv(chunks, config.pop("splits"))
    splits = cdiv(chunks, per_split)
    fwd = _launch_fwd.prepare(
        (cdiv(M, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"]), splits),
        stride, M, N, K, per_split, fmt.groups(K), fmt.scale_columns(N),
        VALUES=fmt.values, CHUNK=fmt.chunk, GROUP=fmt.group, ROWS=fmt.rows, NARROW=_narrow(fmt, dtype, scale),
        EVEN_M=M % config["BLOCK_M"] == 0, EVEN_K=K % fmt.chunk == 0, ACTIVATION=activation,
        SPLIT=splits > 1, PDL=splits > 1 and has_pdl(device),
        **config,
    )  # fmt: skip
    summed = _launch_sum.prepare(
        (cdiv(M * N, SUM_BLOCK),), M * N, N, splits,
        ACTIVATION=activation, BLOCK=SUM_BLOCK, num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return fwd, summed, splits


def linear(x: Tensor, parts: Parts, bias: Tensor | None, fmt: Format, activation: str) -> Tensor:
    """Return activation(x wᵀ + bias) for x [M, K] whose rows are contiguous."""
    (M, K), N = x.shape, parts.codes.shape[0]
    y = x.new_empty(M, N)
    fwd, summed, splits = _plan(
        (M, N, K), x.stride(0), x.dtype, parts.scale.dtype, x.get_device(), fmt.name, activation, bias is not None
    )
    if splits == 1:
        fwd(x, parts.codes, parts.scale, parts.zero, parts.levels, bias, y)
        return y
    partials = x.new_empty(splits, M, N, dtype=torch.float32)
    fwd(x, parts.codes, parts.scale, parts.zero, parts.levels, None, partials)
    summed(partials, bias, y)
    return y


@cached_plan
def _dequantize_plan(N: int, K: int, name: str, scale: torch.dtype, dtype: torch.dtype, device: int) -> Any:
    """Return the launch that takes the parts and writes the weight in this dtype."""
    fmt = parse(name)
    return _launch_dequantize.prepare(
        (cdiv(N, DEQUANTIZED_ROWS) * cdiv(K, fmt.chunk),), N, K, fmt.groups(K), fmt.scale_columns(N),
        VALUES=fmt.values, CHUNK=fmt.chunk, GROUP=fmt.group, ROWS=fmt.rows, BLOCK_N=DEQUANTIZED_ROWS, num_warps=4,
    )  # fmt: skip


def dequantized(parts: Parts, fmt: Format, K: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] of packed codes."""
    N = parts.codes.shape[0]
    weight = parts.codes.new_empty(N, K, dtype=dtype)
    _dequantize_plan(N, K, fmt.name, parts.scale.dtype, dtype, weight.get_device())(*parts, weight)
    return weight
