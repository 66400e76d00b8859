"""Samples of every dtype and exact arithmetic on them, for tests that require bit-exact results."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
I8, I16, I32, I64 = torch.int8, torch.int16, torch.int32, torch.int64
U8, U16, U32, U64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
BOOL = torch.bool
FLOATS, FP8 = (F16, BF16, F32, F64), (E4M3, E5M2)
SIGNED, UNSIGNED = (I8, I16, I32, I64), (U8, U16, U32, U64)
INTEGERS = SIGNED + UNSIGNED
MANTISSA = {E4M3: 3, E5M2: 2, F16: 10, BF16: 7, F32: 23, F64: 52}  # stored bits
NAMES = {E4M3: "float8e4nv", E5M2: "float8e5", BOOL: "int1"}  # names in tl that differ from torch's
LANES = 128


def name_of(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def sample(dtype: torch.dtype, which: int = 0, special: bool = True) -> Tensor:
    """Return random numbers; x (which=0) and y (which=1) begin with all pairs of special values."""
    rng = np.random.default_rng(which)
    if dtype == BOOL:
        return torch.from_numpy(rng.integers(0, 2, LANES).astype(bool))
    if dtype.is_floating_point:
        finfo = torch.finfo(dtype)
        values = rng.standard_normal(LANES) * 2.0 ** rng.integers(-6, 7, LANES)
        edges: list[Any] = [0.0, -0.0, math.inf, -math.inf, math.nan, finfo.smallest_normal / 4, finfo.max]
    else:
        info = torch.iinfo(dtype)
        values = rng.integers(info.min, info.max, LANES, name_of(dtype), endpoint=True)
        values[LANES // 2 :] = rng.integers(1, 100, LANES - LANES // 2)
        edges = [0, 1, info.min, info.max, info.max - 1, 3, info.max if not info.min else -1]
    if special:
        pairs = np.array(edges, values.dtype).repeat(7) if which % 2 == 0 else np.tile(edges, 7)
        values[:49] = np.roll(pairs, which // 2)
    return torch.from_numpy(values).to(dtype)


def wide(tensor: Tensor) -> np.ndarray:
    """Convert without loss to fp64 or Python integers."""
    if tensor.dtype.is_floating_point:
        return tensor.double().numpy()
    return np.array(tensor.numpy().tolist(), bool if tensor.dtype == BOOL else object)


def narrow(values: Any, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype: integers wrap around, floats round to nearest."""
    values = (
        values.numpy() if isinstance(values, Tensor) else np.array(values, None if dtype.is_floating_point else object)
    )
    if dtype == BOOL:
        return torch.from_numpy(values.astype(bool))
    if dtype.is_floating_point:
        return torch.from_numpy(values.astype(np.float64)).to(dtype)
    width = torch.iinfo(dtype).bits
    wrapped = np.array([int(v) % 2**width for v in values.ravel()], f"u{width // 8}")
    return torch.from_numpy(wrapped.reshape(values.shape)).view(dtype)


def rounded(value: Any, dtype: torch.dtype, toward_zero: bool = False) -> float:
    """Round an exact number to a float type; the fp8 types saturate."""
    if isinstance(value, float) and (not math.isfinite(value) or value == 0):
        return math.copysign(torch.finfo(dtype).max, value) if dtype in FP8 and math.isinf(value) else value
    exact, finfo = Fraction(value), torch.finfo(dtype)
    if not exact:
        return 0.0
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, math.frexp(finfo.smallest_normal)[1] - 1) - MANTISSA[dtype])
    size = (math.trunc if toward_zero else round)(abs(exact) / step) * step
    if size > finfo.max:
        size = finfo.max if toward_zero or dtype in FP8 else math.inf
    return math.copysign(float(size), 1 if exact > 0 else -1)


def block(*shape: int, dtype: torch.dtype = F32, low: int = -8, high: int = 9, seed: int = 0) -> Tensor:
    """Return integers small enough that their sums and products are exact."""
    low = low if dtype not in UNSIGNED else 0
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape)).to(dtype)


def assert_near(got: Tensor, expected: Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert got.dtype == expected.dtype
    if rtol or atol:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
        return
    differ = bits(got) != bits(expected)
    if got.dtype.is_floating_point:
        differ &= ~(got.float().isnan() & expected.float().isnan()).flatten().numpy()
    where = np.flatnonzero(differ)
    if len(where):
        first = int(where[0])
        pytest.fail(f"{len(where)} differ; [{first}] is {got.flatten()[first]}, not {expected.flatten()[first]}")


def bits(tensor: Tensor) -> np.ndarray:
    kind = {1: torch.uint8, 2: I16, 4: I32, 8: I64}[tensor.element_size()]
    return tensor.contiguous().flatten().view(kind).numpy()
