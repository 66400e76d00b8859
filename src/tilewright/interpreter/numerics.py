"""Triton's number types in numpy.

A value in flight is held in the narrowest numpy type that has its arithmetic: fp16, bf16 and the fp8s as float32 that
are rounded to their own type after every operation, integers as signed ones of their width whatever their sign (as in
LLVM, where the operation knows), int1 as bool. In memory a value has its own bits: `pack` and `unpack` go between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton.language as tl

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
_INTEGERS = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}
_UNSIGNED = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}


@dataclass(frozen=True)
class Small:
    """A float type that numpy lacks, or does not compute with."""

    mantissa: int  # stored bits
    bias: int
    largest: float
    beyond: float  # what is too large becomes, rounded to nearest
    infinity: bool = True  # has codes for it
    negative_zero: bool = True

    @property
    def least_exponent(self) -> int:
        return 1 - self.bias


_INF, _NAN = float("inf"), float("nan")
SMALL = {
    "fp16": Small(10, 15, 65504.0, _INF),
    "bf16": Small(7, 127, 3.3895313892515355e38, _INF),
    "fp8e4nv": Small(3, 7, 448.0, 448.0, infinity=False),
    "fp8e5": Small(2, 15, 57344.0, 57344.0),
    "fp8e4b8": Small(3, 8, 240.0, _NAN, infinity=False, negative_zero=False),
    "fp8e5b16": Small(2, 16, 57344.0, _NAN, infinity=False, negative_zero=False),
    "fp8e4b15": Small(3, 15, 1.75, 1.75, infinity=False),
}


def numpy_type(ty: tl.dtype) -> np.dtype:
    """Of values in flight."""
    ty = ty.scalar
    if ty.is_ptr():
        return _INTEGERS[64]
    if ty.is_floating():
        return F64 if ty.primitive_bitwidth == 64 else F32
    return np.dtype(bool) if ty.primitive_bitwidth == 1 else _INTEGERS[ty.primitive_bitwidth]


def itemsize(ty: tl.dtype) -> int:
    """Bytes in memory."""
    return 8 if ty.scalar.is_ptr() else max(1, ty.scalar.primitive_bitwidth // 8)


def unsigned(data: np.ndarray) -> np.ndarray:
    return data if data.dtype == bool else data.view(_UNSIGNED[data.itemsize * 8])


def signed(data: np.ndarray) -> np.ndarray:
    return data if data.dtype == bool else data.view(_INTEGERS[data.itemsize * 8])


def rounded(data: np.ndarray, ty: tl.dtype, toward_zero: bool = False) -> np.ndarray:
    """Floats rounded to a float type, to nearest even unless told otherwise; held as `numpy_type` says."""
    name = str(ty.scalar.name)
    small = SMALL.get(name)
    if small is None:
        return _narrowed(data, toward_zero) if name == "fp32" else data.astype(F64, copy=False)
    if not toward_zero:
        if name == "bf16" and data.dtype == F32:
            return _to_bf16(data)
        if name == "fp16":
            return data.astype(np.float16).astype(F32)
    return _to_small(data, small, toward_zero)


def _narrowed(data: np.ndarray, toward_zero: bool) -> np.ndarray:
    near = data.astype(F32, copy=False)
    if not toward_zero or data.dtype == F32:
        return near
    return np.where(np.abs(near.astype(F64)) > np.abs(data), np.nextafter(near, F32.type(0)), near)


def _to_bf16(data: np.ndarray) -> np.ndarray:
    bits = data.view(np.uint32)
    out = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    out = out.view(F32)
    nan = np.isnan(data)
    return np.where(nan, _ONE_NAN, out) if nan.any() else out


_ONE_NAN = np.uint32(0x7FFFFFFF).view(F32)  # that all conversions give


def _to_small(data: np.ndarray, small: Small, toward_zero: bool) -> np.ndarray:
    wide = data.astype(F64, copy=False)
    _, exponent = np.frexp(wide)  # wide = f * 2**exponent, 1/2 <= f < 1
    step = np.ldexp(1.0, np.maximum(exponent - 1, small.least_exponent) - small.mantissa)
    out = (np.trunc if toward_zero else np.rint)(wide / step) * step
    large = np.abs(out) > small.largest  # infinity too
    if large.any():
        kept = np.inf if small.infinity else small.beyond
        beyond = np.where(np.isfinite(wide), small.largest, kept) if toward_zero else small.beyond
        out = np.where(large, np.copysign(beyond, wide), out)
    if not small.negative_zero:
        out = out + 0.0
    return np.where(np.isnan(out), _ONE_NAN, out.astype(F32))


def _decoded(small: Small) -> np.ndarray:
    """The value of each of the 256 codes of an 8-bit type."""
    code = np.arange(256)
    mantissa = code & ((1 << small.mantissa) - 1)
    exponent = (code & 0x7F) >> small.mantissa
    normal = np.ldexp(1.0 + mantissa / (1 << small.mantissa), exponent - small.bias)
    value = np.where(exponent == 0, np.ldexp(mantissa / (1 << small.mantissa), small.least_exponent), normal)
    value = np.where(value > small.largest, np.nan, value)
    if small.infinity:
        value = np.where(((code & 0x7F) >> small.mantissa == 31) & (mantissa == 0), np.inf, value)
    value = np.where(code & 0x80, -value, value)
    if not small.negative_zero:
        value[0x80] = np.nan
    bits = value.astype(F32).view(np.uint32)
    own = (code & 0x80) << 24 | 0x7F800000 | mantissa << (23 - small.mantissa)  # NaNs stay apart from each other
    return np.where(np.isnan(value) & (mantissa > 0), own.astype(np.uint32), bits).view(F32)


_VALUES_OF_CODES = {name: _decoded(small) for name, small in SMALL.items() if name.startswith("fp8")}


def _codes(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes in rising order and their codes."""
    values = _VALUES_OF_CODES[name][:128]
    known = np.flatnonzero(~np.isnan(values))
    return values[known], known.astype(np.uint8)


_CODES_OF_VALUES = {name: _codes(name) for name in _VALUES_OF_CODES}


def pack(data: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """Values as they lie in memory: unsigned integers of the type's width."""
    name = str(ty.scalar.name)
    if name in _CODES_OF_VALUES:
        magnitudes, codes = _CODES_OF_VALUES[name]
        code = codes[np.minimum(np.searchsorted(magnitudes, np.abs(data)), len(codes) - 1)]
        nan = np.isnan(data)
        if nan.any():
            top = np.ascontiguousarray(data).view(np.uint32) >> (23 - SMALL[name].mantissa) & 0x7F
            code = np.where(nan, top.astype(np.uint8), code)
        code = code | (np.signbit(data).astype(np.uint8) << 7)
        return code if SMALL[name].negative_zero else np.where(nan, np.uint8(0x80), code)
    if name == "bf16":
        return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if name == "fp16":
        return data.astype(np.float16).view(np.uint16)
    if data.dtype == bool:
        return data.astype(np.uint8)
    data = np.ascontiguousarray(data)
    return data.view(_UNSIGNED[data.itemsize * 8])


def unpack(bits: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """The values that memory holds."""
    name = str(ty.scalar.name)
    if name in _VALUES_OF_CODES:
        return _VALUES_OF_CODES[name][bits]
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(F32)
    if name == "fp16":
        return bits.view(np.float16).astype(F32)
    if name == "int1":
        return bits != 0
    return bits.view(numpy_type(ty))


def to_tf32(data: np.ndarray) -> np.ndarray:
    """What a tensor core reads of an fp32 operand: 10 bits of mantissa."""
    bits = data.view(np.uint32)
    return np.where(np.isfinite(data), bits & np.uint32(0xFFFFE000), bits).astype(np.uint32).view(F32)


def odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of fp64, its last bit set where it is inexact: it then rounds to less as the exact sum would."""
    near = a + b
    rest = near - a
    error = (a - (near - rest)) + (b - rest)
    even = near.view(np.int64) % 2 == 0
    return np.where((np.abs(error) > 0) & even, np.nextafter(near, np.copysign(np.inf, error)), near)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of floats the one that is not NaN, and +0 rather than -0."""
    out = np.fmax(a, b)
    if out.dtype.kind == "f" and not out.all():
        out = np.where((a == 0) & (b == 0), a + b, out)
    return out


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -maximum(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


def to_integer(data: np.ndarray, bits: int, is_signed: bool) -> np.ndarray:
    """Floats toward zero and clamped, as the conversion instruction does; int8 is what is left of int16."""
    wide = max(bits, 16)
    least, most = (-(2 ** (wide - 1)), 2 ** (wide - 1) - 1) if is_signed else (0, 2**wide - 1)
    whole = np.trunc(data.astype(F64, copy=False))
    low, high = whole <= float(least), whole >= float(most)
    out = np.where(low | high | np.isnan(whole), 0, whole).astype(_INTEGERS[wide] if is_signed else _UNSIGNED[wide])
    out[low], out[high] = least, most
    if data.dtype == F64 or wide == 64:
        out[np.isnan(whole)] = least if is_signed else 2 ** (wide - 1)  # 0 otherwise
    return signed(out).astype(_INTEGERS[bits])
