"""Conversions and elementwise arithmetic, rounded after every operation as on the hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir

from tilewright.interpreter import libdevice, numerics
from tilewright.interpreter.exceptions import UnsupportedFeature, current_line
from tilewright.interpreter.values import Bounds, Handle, Operations, Wrap


class Arithmetic(Operations):
    """Conversions, integer and floating-point arithmetic, comparisons and selection."""

    # Conversions

    def create_int_cast(self, value: Handle, ty: tl.dtype, is_signed: bool) -> Handle:
        ty, data = ty.scalar, value.data
        if ty.is_bool():
            return self._make((data & 1).astype(bool), ty)
        if not is_signed:
            data = numerics.unsigned(data)
        bounds, wrapped = value._bounds, value.wrapped
        if wrapped is not None and not is_signed and 0 <= wrapped.value < 2**32:
            wrapped = None  # the value fits an unsigned integer
        if bounds is not None and not (is_signed or bounds[0] >= 0):
            bounds = None
        if bounds is not None and not _fits(bounds, ty.primitive_bitwidth):
            bounds = None
        return self._make(data.astype(numerics.numpy_type(ty)), ty, bounds, wrapped)

    def create_fp_to_fp(self, value: Handle, ty: tl.dtype, rounding: Any) -> Handle:
        return self._make(numerics.rounded(value.data, ty, rounding == ir.ROUNDING_MODE.RTZ), ty.scalar)

    def create_fp_trunc(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(numerics.rounded(value.data, ty), ty.scalar)

    create_fp_ext = create_fp_trunc

    def create_si_to_fp(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(_from_integer(value.data, ty), ty.scalar)

    def create_ui_to_fp(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(_from_integer(numerics.unsigned(value.data), ty), ty.scalar)

    def create_fp_to_si(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(numerics.to_integer(value.data, ty.scalar.primitive_bitwidth, is_signed=True), ty.scalar)

    def create_fp_to_ui(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(numerics.to_integer(value.data, ty.scalar.primitive_bitwidth, is_signed=False), ty.scalar)

    def create_bitcast(self, value: Handle, ty: tl.dtype) -> Handle:
        ty = ty.scalar
        if ty.is_ptr() or value.dtype.is_ptr():
            return self._make(self.memory.resolve(value.data) if ty.is_ptr() else value.data, ty)
        return self._make(numerics.unpack(numerics.pack(value.data, value.dtype), ty), ty)

    def create_int_to_ptr(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(self.memory.resolve(value.data.astype(np.int64)), ty.scalar)

    def create_ptr_to_int(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(value.data.astype(numerics.numpy_type(ty)), ty.scalar)

    # Integer arithmetic: wraps around as the hardware does, and records that it did

    def _wrapping(self, a: Handle, b: Handle, ufunc: np.ufunc, exact: Callable[[int, int], int]) -> Handle:
        if a.data.dtype == bool:
            return self._make((ufunc(a.data.astype(np.int8), b.data.astype(np.int8)) & 1).astype(bool), a)
        (a0, a1), (b0, b1) = a.bounds, b.bounds
        corners = [exact(a0, b0), exact(a0, b1), exact(a1, b0), exact(a1, b1)]
        bounds = (min(corners), max(corners))
        wrapped = Wrap.of(a, b)
        bits = a.data.itemsize * 8
        if not _fits(bounds, bits):
            bounds = None
            if bits == 32 and wrapped is None:  # the default width of offsets; narrower integers wrap on purpose
                wide = ufunc(a.data.astype(np.int64), b.data.astype(np.int64))
                lanes = (wide < -(2**31)) | (wide >= 2**31)
                if lanes.any():
                    wrapped = Wrap(current_line(), int(wide[lanes].reshape(-1)[0]), bits, lanes)
        return self._make(ufunc(a.data, b.data), a, bounds, wrapped)

    def create_add(self, a: Handle, b: Handle) -> Handle:
        return self._wrapping(a, b, np.add, lambda x, y: x + y)

    def create_sub(self, a: Handle, b: Handle) -> Handle:
        return self._wrapping(a, b, np.subtract, lambda x, y: x - y)

    def create_mul(self, a: Handle, b: Handle) -> Handle:
        return self._wrapping(a, b, np.multiply, lambda x, y: x * y)

    def create_sdiv(self, a: Handle, b: Handle) -> Handle:
        return self._make(_quotient(a.data, b.data), a, _shrunk(a), a.wrapped)

    def create_udiv(self, a: Handle, b: Handle) -> Handle:
        return self._make(numerics.signed(_quotient(numerics.unsigned(a.data), numerics.unsigned(b.data))), a)

    def create_srem(self, a: Handle, b: Handle) -> Handle:
        return self._make(_remainder(a.data, b.data), a)

    def create_urem(self, a: Handle, b: Handle) -> Handle:
        return self._make(numerics.signed(_remainder(numerics.unsigned(a.data), numerics.unsigned(b.data))), a)

    def create_shl(self, a: Handle, b: Handle) -> Handle:
        return self._make(_shifted(np.left_shift, a.data, b.data), a, None, a.wrapped)

    def create_lshr(self, a: Handle, b: Handle) -> Handle:
        return self._make(numerics.signed(_shifted(np.right_shift, numerics.unsigned(a.data), b.data)), a)

    def create_ashr(self, a: Handle, b: Handle) -> Handle:
        bits = a.data.itemsize * 8
        return self._make(
            np.right_shift(a.data, np.minimum(numerics.unsigned(b.data), bits - 1).astype(a.data.dtype)), a
        )

    def create_umulhi(self, a: Handle, b: Handle) -> Handle:
        if a.data.itemsize == 8:
            return self._make(libdevice.evaluate("__nv_umul64hi", [a.data, b.data]), a)
        x, y = (numerics.unsigned(v.data).astype(np.uint64) for v in (a, b))
        return self._make(numerics.signed((x * y >> np.uint64(32)).astype(np.uint32)), a)

    # Floating-point arithmetic

    def create_fma(self, a: Handle, b: Handle, c: Handle) -> Handle:
        return self._make(_fused(a.data, b.data, c.data, c.dtype), c)

    def create_frem(self, a: Handle, b: Handle) -> Handle:
        """Compute the remainder as compiled code does, which is exact only if the quotient is."""
        quotient = np.trunc(numerics.rounded(a.data / b.data, a.dtype))
        return self._make(np.where(np.isinf(b.data), a.data, _fused(-quotient, b.data, a.data, a.dtype)), a)

    def create_clampf(self, x: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        out = numerics.minimum(numerics.maximum(x.data, low.data), high.data)
        nan = np.isnan(x.data)
        if nan.any():
            if propagate_nan == tl.PropagateNan.ALL:
                out = np.where(nan, x.data, out)
            else:  # clamping to [-limit, limit] compiles to one instruction, which keeps the sign of NaN
                out = np.where(nan & (low.data == -high.data), np.copysign(high.data, x.data), out)
        return self._make(out, x)

    def create_select(self, condition: Handle, a: Handle, b: Handle) -> Handle:
        bounds = None
        if a.data.dtype.kind == "i" and a._bounds is not None and b._bounds is not None:
            bounds = (min(a._bounds[0], b._bounds[0]), max(a._bounds[1], b._bounds[1]))
        wrapped = Wrap.of(a, b)
        if wrapped is not None:
            off = np.zeros(1, bool)
            lanes = [h.wrapped.lanes if h.wrapped else off for h in (a, b)]
            wrapped = replace(wrapped, lanes=np.where(condition.data, *lanes))
        return self._make(np.where(condition.data, a.data, b.data), a, bounds, wrapped)

    def create_extern_elementwise(self, library, path, symbol, args, ty, is_pure) -> Handle:
        try:
            return self._make(libdevice.evaluate(symbol, [a.data for a in args]), ty.scalar)
        except KeyError:
            raise UnsupportedFeature(f"the extern function {symbol}") from None


def _rounded(ufunc: Callable[..., np.ndarray]) -> Callable[..., Handle]:
    return lambda self, *args: self._rounding(ufunc(*[a.data for a in args]), args[0])


def _exact(ufunc: Callable[..., np.ndarray]) -> Callable[[Arithmetic, Handle, Handle], Handle]:
    return lambda self, a, b: self._make(ufunc(a.data, b.data), a, None, Wrap.of(a, b))


def _comparison(
    ufunc: Callable[..., np.ndarray], unsigned: bool = False
) -> Callable[[Arithmetic, Handle, Handle], Handle]:
    def method(self: Arithmetic, a: Handle, b: Handle) -> Handle:
        x, y = (numerics.unsigned(a.data), numerics.unsigned(b.data)) if unsigned else (a.data, b.data)
        return self._make(ufunc(x, y), tl.int1)

    return method


def _propagating(ufunc: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, ufunc(x, y)).astype(x.dtype)


def _erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x, np.float64))).numpy()


def _flushed(x: np.ndarray) -> np.ndarray:
    """Flush subnormal fp32 numbers to zero, as some instructions do."""
    if x.dtype != np.float32 or not (small := np.abs(x) < np.float32(2.0**-126)).any():
        return x
    return np.where(small, np.copysign(np.float32(0), x), x)


_ROUNDED = {
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": np.divide,
    "precise_divf": np.divide,
    "approx_divf": np.divide,
    "fabs": np.abs,
    "fneg": np.negative,
    "cos": np.cos,
    "sin": np.sin,
    "exp": np.exp,
    "exp2": lambda x: _flushed(np.exp2(_flushed(x))),
    "log": np.log,
    "log2": np.log2,
    "sqrt": lambda x: np.sqrt(_flushed(x)),
    "precise_sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(_flushed(x).astype(np.float64)),
    "floor": lambda x: np.floor(_flushed(x)),
    "ceil": lambda x: np.ceil(_flushed(x)),
    "erf": _erf,
}
_EXACT = {
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "minsi": np.minimum,
    "maxsi": np.maximum,
    "minui": numerics.on_unsigned(np.minimum),
    "maxui": numerics.on_unsigned(np.maximum),
    "minnumf": numerics.minimum,
    "maxnumf": numerics.maximum,
    "minimumf": _propagating(numerics.minimum),
    "maximumf": _propagating(numerics.maximum),
}
_COMPARED = {"LE": np.less_equal, "LT": np.less, "GE": np.greater_equal, "GT": np.greater}
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _rounded(f) for name, f in _ROUNDED.items()},
    **{name: _exact(f) for name, f in _EXACT.items()},
    "and": lambda self, a, b: self._make(a.data & b.data, a),  # drops the overflow: hashes wrap and mask on purpose
    "iabs": lambda self, a: self._make(np.abs(a.data), a),
    **{f"icmpS{name}": _comparison(f) for name, f in _COMPARED.items()},
    **{f"icmpU{name}": _comparison(f, unsigned=True) for name, f in _COMPARED.items()},
    **{f"fcmpO{name}": _comparison(f) for name, f in _COMPARED.items()},
    "icmpEQ": _comparison(np.equal),
    "icmpNE": _comparison(np.not_equal),
    "fcmpOEQ": _comparison(np.equal),
    "fcmpUNE": _comparison(np.not_equal),
}
for _name, _method in _METHODS.items():
    setattr(Arithmetic, f"create_{_name}", _method)


def _fits(bounds: tuple[int, int], bits: int) -> bool:
    return bounds[0] >= -(2 ** (bits - 1)) and bounds[1] < 2 ** (bits - 1)


def _shrunk(value: Handle) -> Bounds:
    """Return bounds for a result between the value and zero."""
    return (min(value._bounds[0], 0), max(value._bounds[1], 0)) if value._bounds else None


def _from_integer(data: np.ndarray, ty: tl.dtype) -> np.ndarray:
    if data.itemsize < 8 or ty.scalar.primitive_bitwidth == 64:
        return numerics.rounded(data.astype(np.float64), ty)
    high, low = (data >> 32).astype(np.float64) * 2.0**32, (data & 0xFFFFFFFF).astype(np.float64)
    return numerics.rounded(numerics.sum_to_odd(high, low), ty)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """Return a * b + c, rounded once."""
    if ty.primitive_bitwidth == 64:
        return libdevice.evaluate("__nv_fma", [a, b, c])
    return numerics.rounded(numerics.sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64)), ty)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the quotient, truncated; division by zero gives all ones, as on the hardware."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, _all_ones(a), (a - np.fmod(a, safe)) // safe).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, a, np.fmod(a, safe)).astype(a.dtype)


def _all_ones(a: np.ndarray) -> Any:
    return ~a.dtype.type(0)


def _shifted(ufunc: np.ufunc, a: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Shift by any amount; the width or more gives zero."""
    by = numerics.unsigned(by)
    bits = a.itemsize * 8
    return np.where(by < bits, ufunc(a, np.minimum(by, bits - 1).astype(a.dtype)), 0).astype(a.dtype)
