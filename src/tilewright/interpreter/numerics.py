"""Triton's dtypes in NumPy: rounding, conversion, and packing to and from memory.

A value is held in the narrowest NumPy type that has its arithmetic: fp16, bf16 and the fp8 types as float32, rounded to
their own type after every operation; integers as signed integers of their width, as in LLVM, where the operation
determines the signedness; int1 as bool. `pack` and `unpack` convert between a value and its bits in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import triton.language as tl

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
_INTEGERS = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}
_UNSIGNED = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}


@dataclass(frozen=True)
class FloatFormat:
    """A float type narrower than fp32."""

    mantissa: int  # stored bits
    bias: int
    largest: float
    overflow: float  # the result of rounding a larger number to nearest
    has_infinity: bool = True
    has_negative_zero: bool = True

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias


_INF, _NAN = float("inf"), float("nan")
NARROW_FLOATS = {
    "fp16": FloatFormat(10, 15, 65504.0, _INF),
    "bf16": FloatFormat(7, 127, 3.3895313892515355e38, _INF),
    "fp8e4nv": FloatFormat(3, 7, 448.0, 448.0, has_infinity=False),
    "fp8e5": FloatFormat(2, 15, 57344.0, 57344.0),
    "fp8e4b8": FloatFormat(3, 8, 240.0, _NAN, has_infinity=False, has_negative_zero=False),
    "fp8e5b16": FloatFormat(2, 16, 57344.0, _NAN, has_infinity=False, has_negative_zero=False),
    "fp8e4b15": FloatFormat(3, 15, 1.75, 1.75, has_infinity=False),
}


def numpy_type(ty: tl.dtype) -> np.dtype:
    """Return the NumPy type in which a value of this type is held."""
    ty = ty.scalar
    if ty.is_ptr():
        return _INTEGERS[64]
    if ty.is_floating():
        return F64 if ty.primitive_bitwidth == 64 else F32
    return np.dtype(bool) if ty.primitive_bitwidth == 1 else _INTEGERS[ty.primitive_bitwidth]


def itemsize(ty: tl.dtype) -> int:
    """Return the bytes that a value takes in memory."""
    return 8 if ty.scalar.is_ptr() else max(1, ty.scalar.primitive_bitwidth // 8)


def unsigned(data: np.ndarray) -> np.ndarray:
    return data if data.dtype == bool else data.view(_UNSIGNED[data.itemsize * 8])


def signed(data: np.ndarray) -> np.ndarray:
    return data if data.dtype == bool else data.view(_INTEGERS[data.itemsize * 8])


def rounded(data: np.ndarray, ty: tl.dtype, toward_zero: bool = False) -> np.ndarray:
    """Round floats to a float type, to nearest even by default; the result has the type `numpy_type(ty)`."""
    name = str(ty.scalar.name)
    narrow = NARROW_FLOATS.get(name)
    if narrow is None:
        return _to_fp32(data, toward_zero) if name == "fp32" else data.astype(F64, copy=False)
    if not toward_zero:
        if name == "bf16" and data.dtype == F32:
            return _to_bf16(data)
        if name == "fp16":
            return data.astype(np.float16).astype(F32)
    return _to_narrow(data, narrow, toward_zero)


def _to_fp32(data: np.ndarray, toward_zero: bool) -> np.ndarray:
    near = data.astype(F32, copy=False)
    if not toward_zero or data.dtype == F32:
        return near
    return np.where(np.abs(near.astype(F64)) > np.abs(data), np.nextafter(near, F32.type(0)), near)


def _to_bf16(data: np.ndarray) -> np.ndarray:
    bits = data.view(np.uint32)
    out = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    out = out.view(F32)
    nan = np.isnan(data)
    return np.where(nan, _NAN_RESULT, out) if nan.any() else out


_NAN_RESULT = np.uint32(0x7FFFFFFF).view(F32)  # the NaN that all conversions produce


def _to_narrow(data: np.ndarray, to: FloatFormat, toward_zero: bool) -> np.ndarray:
    wide = data.astype(F64, copy=False)
    _, exponent = np.frexp(wide)  # wide = f * 2**exponent, 1/2 <= f < 1
    step = np.ldexp(1.0, np.maximum(exponent - 1, to.min_exponent) - to.mantissa)
    out = (np.trunc if toward_zero else np.rint)(wide / step) * step
    large = np.abs(out) > to.largest  # or infinite
    if large.any():
        infinity = np.inf if to.has_infinity else to.overflow
        overflow = np.where(np.isfinite(wide), to.largest, infinity) if toward_zero else to.overflow
        out = np.where(large, np.copysign(overflow, wide), out)
    if not to.has_negative_zero:
        out = out + 0.0
    return np.where(np.isnan(out), _NAN_RESULT, out.astype(F32))


def _fp8_values(fp8: FloatFormat) -> np.ndarray:
    """Return the values of the 256 bit patterns of an 8-bit type."""
    pattern = np.arange(256)
    mantissa = pattern & ((1 << fp8.mantissa) - 1)
    exponent = (pattern & 0x7F) >> fp8.mantissa
    normal = np.ldexp(1.0 + mantissa / (1 << fp8.mantissa), exponent - fp8.bias)
    value = np.where(exponent == 0, np.ldexp(mantissa / (1 << fp8.mantissa), fp8.min_exponent), normal)
    value = np.where(value > fp8.largest, np.nan, value)
    if fp8.has_infinity:
        value = np.where((exponent == 31) & (mantissa == 0), np.inf, value)
    value = np.where(pattern & 0x80, -value, value)
    if not fp8.has_negative_zero:
        value[0x80] = np.nan
    bits = value.astype(F32).view(np.uint32)
    payload = (pattern & 0x80) << 24 | 0x7F800000 | mantissa << (23 - fp8.mantissa)  # NaNs keep their payload
    return np.where(np.isnan(value) & (mantissa > 0), payload.astype(np.uint32), bits).view(F32)


_FP8_VALUES = {name: _fp8_values(fp8) for name, fp8 in NARROW_FLOATS.items() if name.startswith("fp8")}


def _fp8_patterns(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the magnitudes of an 8-bit type in ascending order, and their bit patterns."""
    values = _FP8_VALUES[name][:128]
    numbers = np.flatnonzero(~np.isnan(values))
    return values[numbers], numbers.astype(np.uint8)


_FP8_PATTERNS = {name: _fp8_patterns(name) for name in _FP8_VALUES}


def pack(data: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """Return the bits of the values in memory, as unsigned integers of the type's width."""
    name = str(ty.scalar.name)
    if name in _FP8_PATTERNS:
        magnitudes, patterns = _FP8_PATTERNS[name]
        bits = patterns[np.minimum(np.searchsorted(magnitudes, np.abs(data)), len(patterns) - 1)]
        nan = np.isnan(data)
        if nan.any():
            payload = np.ascontiguousarray(data).view(np.uint32) >> (23 - NARROW_FLOATS[name].mantissa) & 0x7F
            bits = np.where(nan, payload.astype(np.uint8), bits)
        bits = bits | (np.signbit(data).astype(np.uint8) << 7)
        return bits if NARROW_FLOATS[name].has_negative_zero else np.where(nan, np.uint8(0x80), bits)
    if name == "bf16":
        return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if name == "fp16":
        return data.astype(np.float16).view(np.uint16)
    if data.dtype == bool:
        return data.astype(np.uint8)
    data = np.ascontiguousarray(data)
    return data.view(_UNSIGNED[data.itemsize * 8])


def unpack(bits: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """Return the values of these bits in memory."""
    name = str(ty.scalar.name)
    if name in _FP8_VALUES:
        return _FP8_VALUES[name][bits]
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(F32)
    if name == "fp16":
        return bits.view(np.float16).astype(F32)
    if name == "int1":
        return bits != 0
    return bits.view(numpy_type(ty))


def to_tf32(data: np.ndarray) -> np.ndarray:
    """Truncate fp32 to the 10 mantissa bits that a tensor core reads."""
    bits = data.view(np.uint32)
    return np.where(np.isfinite(data), bits & np.uint32(0xFFFFE000), bits).astype(np.uint32).view(F32)


def sum_to_odd(a: np.ndarray, b: np.ndarray, near: np.ndarray | None = None) -> np.ndarray:
    """Return the fp64 sum rounded to odd, which rounds to narrower types exactly as the exact sum does."""
    near = a + b if near is None else near
    rest = near - a
    error = (a - (near - rest)) + (b - rest)
    even = near.view(np.int64) % 2 == 0
    return np.where((np.abs(error) > 0) & even, np.nextafter(near, np.copysign(np.inf, error)), near)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the larger number; NaN loses against a number, and -0 against +0."""
    out = np.fmax(a, b)
    if out.dtype.kind == "f" and not out.all():
        out = np.where((a == 0) & (b == 0), a + b, out)
    return out


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -maximum(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


def to_integer(data: np.ndarray, bits: int, is_signed: bool) -> np.ndarray:
    """Truncate and clamp floats as the conversion instruction does; int8 is the low half of int16."""
    wide = max(bits, 16)
    lowest, highest = (-(2 ** (wide - 1)), 2 ** (wide - 1) - 1) if is_signed else (0, 2**wide - 1)
    whole = np.trunc(data.astype(F64, copy=False))
    low, high = whole <= float(lowest), whole >= float(highest)
    out = np.where(low | high | np.isnan(whole), 0, whole).astype(_INTEGERS[wide] if is_signed else _UNSIGNED[wide])
    out[low], out[high] = lowest, highest
    if data.dtype == F64 or wide == 64:
        out[np.isnan(whole)] = lowest if is_signed else 2 ** (wide - 1)  # and 0 in all other conversions
    return signed(out).astype(_INTEGERS[bits])


def on_unsigned(ufunc: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return an operation on integers that are taken as unsigned."""
    return lambda a, b: signed(ufunc(unsigned(a), unsigned(b)))
