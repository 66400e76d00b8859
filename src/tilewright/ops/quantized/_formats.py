"""Formats of quantised weights, and their codes as plain torch: quantise, pack, unpack, dequantise.

A weight [N, K] is a matrix of codes and one scale per group of consecutive columns: w = value(code) * scale, or
(value(code) - zero) * scale. Scales and zero points are [groups, N]: the kernels read those of neighbouring rows
together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# The 16 quantiles of a normal distribution that QLoRA (arXiv 2305.14314, appendix E) names NF4.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the codes from 8 on are their negatives
LARGEST = {"int4": 7.0, "int8": 127.0, "e4m3": 448.0, "e2m1": 6.0, "nf4": 1.0}  # magnitude that a scale maps to
BIAS = {"int4": 8, "int8": 128}  # integers are stored unsigned: code = value + bias
NAN_SCALE = 255  # as an E8M0 scale
WORD = 32  # bits: packed codes are int32
WORDS = 16  # words of one row in a chunk: four lanes of a warp load 16 bytes each
ROWS = 128  # rows of a block of "fp8-block128"
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Format:
    """How a weight is stored."""

    name: str
    values: str  # what codes stand for: int4, int8, e4m3, e2m1, nf4
    group: int = 0  # columns that share a scale; 0: all of them
    rows: int = 1  # rows that share a scale; 0: all of them
    zero: str = ""  # "integer" or "float" zero points; "": none, codes are symmetric around 0
    has_e8m0: bool = False  # scales are powers of two, stored as their exponents
    quantizes_x: bool = False  # activations are quantised per token to the same values; codes are then not packed

    @property
    def bits(self) -> int:
        return 4 if self.values in ("int4", "e2m1", "nf4") else 8

    @property
    def is_integer(self) -> bool:
        return self.values in BIAS

    @property
    def chunk(self) -> int:
        """The columns that are packed together: the codes of one row and step of the kernel."""
        return WORDS * WORD // self.bits

    def groups(self, K: int) -> int:
        return -(-K // self.group) if self.group else 1

    def scale_columns(self, N: int) -> int:
        return -(-N // self.rows) if self.rows else 1

    def __str__(self) -> str:
        return self.name


def _known() -> dict[str, Format]:
    found = [
        Format("int8-a8", "int8", quantizes_x=True),
        Format("fp8-a8", "e4m3", quantizes_x=True),
        Format("fp8", "e4m3"),
        Format("fp8-tensor", "e4m3", rows=0),
        Format("fp8-block128", "e4m3", group=128, rows=ROWS),
        Format("mxfp8", "e4m3", group=32, has_e8m0=True),
        Format("mxfp4", "e2m1", group=32, has_e8m0=True),
        Format("nf4", "nf4", group=64),
        *(Format(f"nf4-g{group}", "nf4", group=group) for group in (32, 128)),
    ]
    for values in ("int8", "int4"):
        for group in (0, *GROUPS):
            name = f"{values}-g{group}" if group else values
            found += [
                Format(name, values, group),
                Format(f"{name}-zero", values, group, zero="integer"),
                Format(f"{name}-float-zero", values, group, zero="float"),
            ]
    return {one.name: one for one in found}


FORMATS = _known()


def parse(name: str) -> Format:
    """Return the format of a name such as "int4-g128"."""
    if name in FORMATS:
        return FORMATS[name]
    if isinstance(name, str) and re.match(r"(int[48]|nf4)-g\d+", name):
        raise ValueError(f"unknown format {name!r}: groups have {', '.join(map(str, GROUPS))} columns")
    raise ValueError(f"unknown format {name!r}: choose from {', '.join(FORMATS)}")


class Parts(NamedTuple):
    """The tensors of a quantised weight [N, K]."""

    codes: Tensor  # int32 [N, words], or int8 or uint8 [N, K] if they are not packed
    scale: Tensor  # [groups, N or blocks of rows]
    zero: Tensor | None = None  # like scale
    levels: Tensor | None = None  # fp32 [16], the values of NF4 codes


def padded(K: int, fmt: Format) -> int:
    """Return the columns that are stored."""
    return K if fmt.quantizes_x else -(-K // fmt.chunk) * fmt.chunk


# Packing. In the tensor cores' fragment of 16 bits, lane c of four holds columns 2c and 2c + 1 of every 8. One word of
# 4-bit codes has, for one lane, such a pair of each of four 8-column blocks: the first columns in its low half, the
# second ones in its high half, so that a shift and a mask leave a pair where a register of the fragment needs it. A
# chunk holds four words of lane 0, then of lane 1, …, and each lane loads its own 16 bytes.
#   4 bits: column = 32 word + 8 block + 2 lane + half, at bit 16 half + 4 block
#   8 bits: column = 16 word + 8 block + 2 lane + half, at bit 16 block + 8 half


def pack(codes: Tensor, fmt: Format) -> Tensor:
    """Pack codes [N, K] of 0 to 2^bits - 1 into int32 words [N, chunks * 16]."""
    N, K = codes.shape
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, padded(K, fmt) - K))
    chunks = codes.shape[1] // fmt.chunk
    if fmt.bits == 8:
        packed = codes.view(N, chunks, 4, 2, 4, 2).permute(0, 1, 4, 2, 3, 5)  # [N, chunk, lane, word, block, half]
    else:
        order = codes.view(N, chunks, 4, 4, 4, 2).permute(0, 1, 4, 2, 5, 3)  # [N, chunk, lane, word, half, block]
        packed = order[..., 0::2] | order[..., 1::2] << 4
    return packed.reshape(N, chunks * WORDS * 4).view(torch.int32)


def unpack(words: Tensor, fmt: Format, K: int) -> Tensor:
    """Return the codes [N, K] of packed words, as uint8."""
    N, chunks = words.shape[0], words.shape[1] // WORDS
    packed = words.contiguous().view(torch.uint8)
    if fmt.bits == 8:
        codes = packed.view(N, chunks, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    else:
        pairs = packed.view(N, chunks, 4, 4, 2, 2)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).permute(0, 1, 3, 5, 2, 4)
    return codes.reshape(N, chunks * fmt.chunk)[:, :K]


def dequantize(parts: Parts, fmt: Format, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [N, K]: computed in fp32 and rounded once, or in float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = parts.codes if fmt.quantizes_x else unpack(parts.codes, fmt, K)
    values = _values(codes, fmt, parts.levels, wide)
    if parts.zero is not None:
        values = values - _expand(parts.zero.to(wide), fmt, values.shape)
    return (values * _expand(decoded_scale(parts.scale, fmt, wide), fmt, values.shape)).to(dtype)


def _values(codes: Tensor, fmt: Format, levels: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values of codes."""
    if fmt.is_integer:
        return codes.to(dtype) if fmt.quantizes_x else codes.to(dtype) - BIAS[fmt.values]
    if fmt.values == "e4m3":
        return codes.view(torch.float8_e4m3fn).float().to(dtype)
    if levels is not None:
        return levels[codes.int()].to(dtype)
    exponent, mantissa = codes >> 1 & 3, (codes & 1).to(dtype) / 2
    values = torch.where(exponent == 0, mantissa, (1 + mantissa) * torch.exp2(exponent.to(dtype) - 1))
    return torch.where(codes >= 8, -values, values)


def decoded_scale(scale: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    return torch.exp2(scale.to(dtype) - 127) if fmt.has_e8m0 else scale.to(dtype)


def _expand(scale: Tensor, fmt: Format, shape: torch.Size) -> Tensor:
    """Return the value for every weight of a matrix [groups, scale columns]."""
    N, K = shape
    found = scale.t()
    if fmt.rows != 1:
        found = found.repeat_interleave(fmt.rows or N, 0)[:N]
    return found.repeat_interleave(fmt.group or K, 1)[:, :K]


def encode(values: Tensor, fmt: Format, levels: Tensor | None = None) -> Tensor:
    """Return the nearest codes of fp32 values in the range of the format."""
    if fmt.is_integer:
        low, high = -BIAS[fmt.values], BIAS[fmt.values] - 1
        signed = values.round().clamp(low, high)
        return signed.to(torch.int8) if fmt.quantizes_x else (signed - low).to(torch.uint8)
    if fmt.values == "e4m3":
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if levels is not None:
        return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    found = nearest_even(values.abs(), torch.tensor(E2M1, device=values.device))
    return found.to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3


def nearest_even(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the nearest level, the even one of two equally near ones, as IEEE rounding does."""
    middles = (levels[1:] + levels[:-1]) / 2
    low, high = torch.bucketize(values, middles, right=False), torch.bucketize(values, middles, right=True)
    return torch.where(low % 2 == 0, low, high)


def quantize_parts(weight: Tensor, fmt: Format) -> Parts:
    """Quantise a weight [N, K] to the nearest codes, with the scales of the largest magnitudes.

    Scales have the dtype of the weight where a group has its own, so that 16-bit weights cost 16 bits per group.
    """
    w = weight.float()
    blocks = _blocks(w, fmt)  # [row blocks, groups, elements]
    per_group = fmt.group > 0 and fmt.rows == 1
    dtype = weight.dtype if per_group and fmt.values != "nf4" else torch.float32
    zero = None
    if fmt.zero:
        codes = 2**fmt.bits - 1
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = _rounded_scale((high - low) / codes, dtype)
        zero = -low / _nonzero(scale) - BIAS[fmt.values]
        zero = zero.round().clamp(-BIAS[fmt.values], BIAS[fmt.values] - 1) if fmt.zero == "integer" else zero
        zero = zero.to(dtype)
    elif fmt.has_e8m0:
        exponent = torch.frexp(blocks.abs().amax(-1))[1] - 1 - (8 if fmt.values == "e4m3" else 2)
        scale = (exponent + 127).clamp(0, NAN_SCALE - 1).to(torch.uint8)  # as the OCP MX specification computes it
    else:
        scale = _rounded_scale(blocks.abs().amax(-1) / LARGEST[fmt.values], dtype)
    scale, zero = (t if t is None else t.t().contiguous() for t in (scale, zero))
    wide = _nonzero(decoded_scale(scale, fmt, torch.float32))
    values = w / _expand(wide, fmt, w.shape)
    if zero is not None:
        values = values + _expand(zero.float(), fmt, w.shape)
    levels = torch.tensor(NF4, device=w.device) if fmt.values == "nf4" else None
    codes = encode(values, fmt, levels)
    return Parts(codes if fmt.quantizes_x else pack(codes, fmt), scale, zero, levels)


def _blocks(w: Tensor, fmt: Format) -> Tensor:
    """Return the weights that share a scale in the last dimension; padding repeats none of them but zero."""
    N, K = w.shape
    rows, group = fmt.rows or max(1, N), fmt.group or max(1, K)
    w = torch.nn.functional.pad(w, (0, -K % group, 0, -N % rows))
    tiles = w.view(w.shape[0] // rows, rows, max(1, w.shape[1] // group), -1)
    return tiles.transpose(1, 2).flatten(2)


def _rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.clamp(max=torch.finfo(dtype).max).to(dtype)


def _nonzero(scale: Tensor) -> Tensor:
    """Return a scale to divide by: a group of zeros has scale 0."""
    return torch.where(scale == 0, 1, scale.float())
