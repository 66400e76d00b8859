"""NVIDIA's libdevice functions on NumPy arrays, each at least as exact as libdevice documents it. fp32 subnormals are
kept, which Triton's builds flush to zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

Function = Callable[..., np.ndarray]

FUNCTIONS: dict[str, Function] = {}  # by symbol without its "__nv_"; all take and return arrays of one dimension


def evaluate(symbol: str, args: list[np.ndarray]) -> np.ndarray:
    """What `symbol` returns for `args`, which broadcast. Unsigned integers come and go as signed ones of their bits."""
    name = symbol.removeprefix("__nv_")
    if name == symbol or name not in FUNCTIONS:
        raise KeyError(symbol)
    shape = np.broadcast_shapes(*(arg.shape for arg in args))
    with np.errstate(all="ignore"):
        return FUNCTIONS[name](*(np.broadcast_to(arg, shape).flatten() for arg in args)).reshape(shape)


def _single(function: Function) -> Function:
    """The fp32 form of a function of fp64."""
    return lambda *args: function(*(a.astype(np.float64) if a.dtype == np.float32 else a for a in args)).astype(
        np.float32
    )


# Integers and bits

_INTEGERS = {"": np.int32, "u": np.uint32, "ll": np.int64, "ull": np.uint64}


def _bits_of(kind: type[np.integer] | type[np.floating]) -> np.dtype:
    return np.dtype(f"i{np.dtype(kind).itemsize}")


def _integer(function: Function, kind: type[np.integer]) -> Function:
    return lambda *args: function(*(a.view(kind) for a in args)).astype(kind).view(_bits_of(kind))


def _mulhi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(object) * b.astype(object) >> 8 * a.itemsize


def _mul24(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a << 8 >> 8) * (b << 8 >> 8)


def _sad(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.where(a > b, a - b, b - a) + c


def _byte_perm(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    picked = np.zeros_like(both)
    for shift in range(0, 32, 8):
        byte = both >> 8 * (selector >> shift // 2 & 7).astype(np.uint64)
        picked |= (byte & np.uint64(0xFF)) << np.uint64(shift)
    return picked


def _bits(x: np.ndarray) -> np.ndarray:
    """A row of bits for each element, the lowest first."""
    return np.unpackbits(x[:, None].view(np.uint8), axis=1, bitorder="little")


def _first(bits: np.ndarray) -> np.ndarray:
    """The index of each row's first one, or how many bits there are."""
    return np.argmax(np.pad(bits, ((0, 0), (0, 1)), constant_values=1), axis=1)


for _prefix in ("", "u"):
    for _name, _function in (
        ("hadd", lambda a, b: (a & b) + ((a ^ b) >> 1)),
        ("rhadd", lambda a, b: (a | b) - ((a ^ b) >> 1)),
        ("mul24", _mul24),
        ("mulhi", _mulhi),
        ("sad", _sad),
    ):
        FUNCTIONS[_prefix + _name] = _integer(_function, _INTEGERS[_prefix])
for _prefix, _kind in _INTEGERS.items():
    FUNCTIONS[f"{_prefix}min"] = _integer(np.minimum, _kind)
    FUNCTIONS[f"{_prefix}max"] = _integer(np.maximum, _kind)
for _suffix in ("", "ll"):
    FUNCTIONS[f"popc{_suffix}"] = lambda x: _bits(x).sum(axis=1, dtype=np.int32)
    FUNCTIONS[f"clz{_suffix}"] = lambda x: _first(_bits(x)[:, ::-1]).astype(np.int32)
    FUNCTIONS[f"ffs{_suffix}"] = lambda x: ((_first(_bits(x)) + 1) % (8 * x.itemsize + 1)).astype(np.int32)
    FUNCTIONS[f"brev{_suffix}"] = lambda x: np.packbits(_bits(x)[:, ::-1], axis=1, bitorder="little").view(x.dtype)[:, 0]

FUNCTIONS |= {
    "mul64hi": _integer(_mulhi, np.int64),
    "umul64hi": _integer(_mulhi, np.uint64),
    "abs": np.abs,
    "llabs": np.abs,
    "byte_perm": _integer(_byte_perm, np.uint32),
    "int_as_float": lambda x: x.view(np.float32),
    "uint_as_float": lambda x: x.view(np.float32),
    "float_as_int": lambda x: x.view(np.int32),
    "float_as_uint": lambda x: x.view(np.int32),
    "longlong_as_double": lambda x: x.view(np.float64),
    "double_as_longlong": lambda x: x.view(np.int64),
    "double2loint": lambda x: x.view(np.int32)[::2],
    "double2hiint": lambda x: x.view(np.int32)[1::2],
    "hiloint2double": lambda high, low: np.stack((low, high), axis=1).view(np.float64)[:, 0],
    "half2float": lambda x: x.view(np.float16).astype(np.float32),
    "float2half_rn": lambda x: x.astype(np.float16).view(np.int16),
}


# Arithmetic and conversions that round as their names say: rn to nearest even, rz to zero, rd down, ru up

_TOWARDS = {"rz": 0.0, "rd": -np.inf, "ru": np.inf}
_TO_WHOLE = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_BEYOND = 2**5000  # no operation on finite fp64 operands has a result as large


def _step(near: np.ndarray, error: np.ndarray, mode: str) -> np.ndarray:
    """A result rounded as `mode` says, from that rounded to nearest and the sign of what is missing in it."""
    if mode == "rn":
        return near
    target = near.dtype.type(_TOWARDS[mode])
    return np.where(error * np.sign(target - near) > 0, np.nextafter(near, target), near)


def _narrow(x: np.ndarray, mode: str) -> np.ndarray:
    near = x.astype(np.float32)
    return _step(near, np.sign(x - near), mode)


def _sum(a, b, mode: str):
    return -(-a - b) if mode == "rd" else a + b  # what cancels leaves -0 where sums are rounded down


def _odd_sum(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """The sum, with a last bit of one where it is inexact, so that rounding it to fp32 is as rounding the exact sum."""
    near = _sum(a, b, mode)
    rest = near - a
    error = (a - (near - rest)) + (b - rest)
    return np.where(
        (np.abs(error) > 0) & (near.view(np.int64) % 2 == 0), np.nextafter(near, np.copysign(np.inf, error)), near
    )


def _fma(a: float, b: float, c: float, mode: str) -> float:
    """a * b + c to nearest."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return _sum(a * b, c, mode)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _error(residual: Callable[..., Fraction], near: float, *args: float) -> int:
    """The sign of what rounding finite operands' result to nearest took off it."""
    if math.isnan(near) or not all(map(math.isfinite, args)):
        return 0
    result = Fraction(near) if math.isfinite(near) else Fraction(_BEYOND if near > 0 else -_BEYOND)
    missing = residual(result, *map(Fraction, args))
    return (missing > 0) - (missing < 0)


class _Operation(NamedTuple):
    nearest: Callable[..., np.ndarray]  # of fp64 operands and the mode
    residual: Callable[..., Fraction]  # of result and operands: has the sign of exact - result
    wide: Callable[..., np.ndarray] | None = None  # of fp32 operands in fp64: what rounds to fp32 as the exact result

    def double(self, mode: str, *args: np.ndarray) -> np.ndarray:
        near = self.nearest(*args, mode)
        if mode == "rn":
            return near
        missing = np.frompyfunc(lambda *each: _error(self.residual, *each), 1 + len(args), 1)(near, *args)
        return _step(near, missing.astype(np.int8), mode)

    def single(self, mode: str, *args: np.ndarray) -> np.ndarray:
        return _narrow((self.wide or self.nearest)(*(a.astype(np.float64) for a in args), mode), mode)


# Quotients and roots of fp32 lie too far from where fp32 rounds for fp64 to hide on which side they are.
_OPERATIONS = {
    "add": _Operation(_sum, lambda r, a, b: a + b - r, _odd_sum),
    "sub": _Operation(
        lambda a, b, mode: _sum(a, -b, mode), lambda r, a, b: a - b - r, lambda a, b, mode: _odd_sum(a, -b, mode)
    ),
    "mul": _Operation(lambda a, b, _: a * b, lambda r, a, b: a * b - r),
    "div": _Operation(lambda a, b, _: a / b, lambda r, a, b: (a - r * b) * b),
    "rcp": _Operation(lambda a, _: 1 / a, lambda r, a: (1 - r * a) * a),
    "sqrt": _Operation(lambda a, _: np.sqrt(a), lambda r, a: a - r * r),
    "fma": _Operation(
        lambda a, b, c, mode: np.frompyfunc(lambda *each: _fma(*each, mode), 3, 1)(a, b, c).astype(np.float64),
        lambda r, a, b, c: a * b + c - r,
        lambda a, b, c, mode: _odd_sum(a * b, c, mode),
    ),
}


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two fp64 arrays that add up to one of integers."""
    return (x >> 32).astype(np.float64) * 2.0**32, (x & 0xFFFFFFFF).astype(np.float64)


def _from_integer(name: str, kind: type[np.integer], mode: str) -> None:
    def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = x.view(kind).astype(np.uint64 if kind is np.uint64 else np.int64)
        return (wide >> 32).astype(np.float64) * 2.0**32, (wide & 0xFFFFFFFF).astype(np.float64)

    FUNCTIONS[f"{name}2float_{mode}"] = lambda x: _narrow(_odd_sum(*halves(x), mode), mode)
    if mode == "rn" or np.dtype(kind).itemsize == 8:
        FUNCTIONS[f"{name}2double_{mode}"] = lambda x: _OPERATIONS["add"].double(mode, *halves(x))
