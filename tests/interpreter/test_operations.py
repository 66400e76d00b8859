"""Every operation of triton.language on every dtype, compared with exact arithmetic or torch.

A case is an expression, its inputs and the expected result, bit-exact unless it has a tolerance. The cases are
interpreted on a machine without a GPU and compiled on one with a GPU, which validates the expectations.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interpreter.exact import (
    BF16,
    BOOL,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    FLOATS,
    FP8,
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    LANES,
    SIGNED,
    U8,
    U16,
    U32,
    U64,
    UNSIGNED,
    assert_near,
    block,
    name_of,
    narrow,
    rounded,
    sample,
    wide,
)

HEADER = """
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def larger_and_total(largest_a, total_a, largest_b, total_b):
    return tl.maximum(largest_a, largest_b), total_a + total_b


@triton.jit
def welford(mean_a, square_a, weight_a, mean_b, square_b, weight_b):
    weight = weight_a + weight_b
    fraction = tl.where(weight == 0, 0.0, weight_b / weight)
    delta = mean_b - mean_a
    return mean_a + delta * fraction, square_a + square_b + delta * delta * weight_a * fraction, weight


@triton.jit
def least_positive(a, b):
    if a > 0 and (b <= 0 or a < b):
        return a
    else:
        return b


@triton.jit
def then(factor_a, term_a, factor_b, term_b):
    return factor_a * factor_b, term_a * factor_b + term_b


@triton.jit
def collatz(x):
    steps = 0
    while x > 1:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        steps += 1
    return steps


@triton.jit
def kernel({parameters}):
"""


@dataclass(frozen=True, eq=False)
class Case:
    expression: str
    inputs: tuple[Any, ...]  # x, y, z and w: tensors are loaded, numbers are passed as arguments
    expected: Tensor | tuple[Tensor, ...]
    rtol: float = 0.0
    atol: float = 0.0

    @property
    def name(self) -> str:
        kinds = [name_of(i.dtype) if isinstance(i, Tensor) else str(i) for i in self.inputs]
        return f"{self.expression[:60]}-{'-'.join(kinds)}"


@pytest.fixture(scope="session")
def make_kernel(tmp_path_factory) -> Callable[[str, str], Any]:
    """Return a function that creates a kernel from its parameters and body, in a file, as Triton requires."""
    folder = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def write(parameters: str, body: str) -> Any:
        path = folder / f"kernel_{len(list(folder.glob('*.py')))}.py"
        text = HEADER.format(parameters=parameters) + "".join(f"    {line}\n" for line in body.splitlines())
        path.write_text(text)
        scope: dict[str, Any] = {"__name__": path.stem}
        exec(compile(text, path, "exec"), scope)
        return scope["kernel"]

    return write


@pytest.fixture
def check(make_kernel, device) -> Callable[[Case], None]:
    """Return a function that computes a case in one program and compares dtypes, shapes and values."""

    def run(case: Case) -> None:
        expected = case.expected if isinstance(case.expected, tuple) else (case.expected,)
        outs = [torch.empty(e.shape, dtype=e.dtype, device=device) for e in expected]
        names, results = "xyzw"[: len(case.inputs)], [f"r{i}" for i in range(len(outs))]
        lines = [_load(n, t) for n, t in zip(names, case.inputs, strict=True) if isinstance(t, Tensor)]
        lines.append(f"{', '.join(results)} = {case.expression}")
        for r, e in zip(results, expected, strict=True):
            lines.append(f"tl.static_assert({r}.dtype == tl.{name_of(e.dtype)})")
            lines += [f"tl.static_assert({r}.shape[{d}] == {size})" for d, size in enumerate(e.shape)]
            lines.append(
                f"tl.store(out_{r}" + (f" + tl.arange(0, {e.numel()}), tl.ravel({r}))" if e.ndim else f", {r})")
            )
        kernel = make_kernel(", ".join([*names, *(f"out_{r}" for r in results)]), "\n".join(lines))
        inputs = [i.contiguous().to(device) if isinstance(i, Tensor) else i for i in case.inputs]
        kernel[(1,)](*inputs, *outs)
        for out, e in zip(outs, expected, strict=True):
            assert_near(out.cpu(), e, case.rtol, case.atol)

    return run


def _load(name: str, tensor: Tensor) -> str:
    if not tensor.ndim:
        return f"{name} = tl.load({name})"
    flat = f"tl.load({name} + tl.arange(0, {tensor.numel()}))"
    return f"{name} = {flat}" if tensor.ndim == 1 else f"{name} = tl.reshape({flat}, {list(tensor.shape)})"


def parametrize(cases: Iterator[Case] | list[Case]) -> Any:
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.name)


def over(dtypes, expression, reference, result: Any = None, rtol: float = 0.0, **inputs: Any) -> Iterator[Case]:
    """Yield one case per dtype; inputs are samples unless given as functions of the dtype."""
    count = max("xyz".index(n) for n in re.findall(r"\b[xyz]\b", expression)) + 1
    for dtype in dtypes:
        given = tuple(inputs[n](dtype) if n in inputs else sample(dtype, i) for i, n in enumerate("xyz"[:count]))
        to = result(dtype) if callable(result) else result or dtype
        with np.errstate(all="ignore"):
            yield Case(expression, given, narrow(reference(*map(wide, given)), to), rtol)


def elementwise(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return np.frompyfunc(function, function.__code__.co_argcount, 1)


@elementwise
def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@elementwise
def smaller(a, b):
    return b if a != a else a if b != b else min(a, b, key=lambda v: (v, math.copysign(1, v)))


@elementwise
def larger(a, b):
    return b if a != a else a if b != b else max(a, b, key=lambda v: (v, math.copysign(1, v)))


@elementwise
def fused(a, b, c):
    """Return a * b + c, rounded once."""
    exact = all(map(math.isfinite, (a, b, c))) and Fraction(a) * Fraction(b) + Fraction(c)
    return rounded(exact, F64) if exact else a * b + c


def compiled_remainder(dtype: torch.dtype) -> Callable[..., np.ndarray]:
    kind = np.float64 if dtype == F64 else np.float32

    def remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        steps = np.trunc(x.astype(kind) / y.astype(kind)).astype(np.float64)
        return np.where(np.isinf(y), x, fused(-steps, y, x).astype(np.float64))

    return remainder


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype == F64 else F32


def propagating(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *args: np.where(functools.reduce(np.logical_or, map(np.isnan, args)), np.nan, function(*args))


def clamped(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return smaller(larger(x, y), z).astype(float)


def plain(which: int, transform: Callable[[np.ndarray], Any] = lambda v: v) -> Callable[[torch.dtype], Tensor]:
    """Return an input function: a sample without special values, transformed."""
    return lambda dtype: narrow(transform(wide(sample(dtype, which, special=False))), dtype)


def divisors(dtype: torch.dtype) -> Tensor:
    return narrow([v if v not in (0, -1) else 7 for v in wide(sample(dtype, 1))], dtype)


def shifts(dtype: torch.dtype) -> Tensor:
    return narrow(wide(sample(dtype, 1)) % torch.iinfo(dtype).bits, dtype)


def arithmetic() -> Iterator[Case]:
    numbers = FLOATS + INTEGERS
    yield from over((*numbers, BOOL, *FP8), "x", lambda x: x)
    yield from over(numbers, "x + y", lambda x, y: x + y)
    yield from over(numbers, "x - y", lambda x, y: x - y)
    yield from over(numbers, "x * y", lambda x, y: x * y)
    yield from over(numbers, "-x", lambda x: 0 - x)
    yield from over(INTEGERS, "x // y", quotient, y=divisors)
    yield from over(INTEGERS, "x % y", lambda x, y: x - quotient(x, y) * y, y=divisors)
    yield from over((F32,), "x / y", lambda x, y: x / y, rtol=3e-7, x=plain(0), y=plain(1))
    yield from over((F16, BF16), "x / y", lambda x, y: x / y, F32, rtol=3e-7, x=plain(0), y=plain(1))
    yield from over((F64,), "x / y", lambda x, y: x / y)
    yield from over((I8, U16, I32), "x / y", lambda x, y: x.astype(float) / y.astype(float), F32, 3e-7, y=divisors)
    for dtype in FLOATS:
        yield from over((dtype,), "x % y", compiled_remainder(dtype), at_least_fp32)
    yield from over((F32, F64), "tl.fdiv(x, y)", lambda x, y: x / y, rtol=3e-7, x=plain(0), y=plain(1))
    yield from over((F32,), "tl.div_rn(x, y)", lambda x, y: x / y)
    yield from over((F32,), "tl.sqrt_rn(x)", np.sqrt)
    yield from over(FLOATS, "tl.fma(x, y, z)", fused, z=lambda dtype: sample(dtype, 2))
    for sign, of in {"&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor}.items():
        yield from over((*INTEGERS, BOOL), f"x {sign} y", of)
    yield from over(INTEGERS, "~x", lambda x: -1 - x)
    yield from over((BOOL,), "~x", np.logical_not)
    yield from over(INTEGERS, "x << y", lambda x, y: x * 2**y, y=shifts)
    yield from over(INTEGERS, "x >> y", lambda x, y: x // 2**y, y=shifts)
    for sign in ("<", "<=", ">", ">=", "==", "!="):
        dtypes = numbers if "<" in sign or ">" in sign else (*numbers, BOOL)
        yield from over(dtypes, f"x {sign} y", eval(f"lambda x, y: x {sign} y"), BOOL)
    yield from over(FLOATS + SIGNED, "tl.abs(x)", np.abs)
    yield from over(UNSIGNED, "tl.abs(x)", lambda x: x)
    # bf16 is compared in fp32
    result = lambda dtype: F32 if dtype == BF16 else dtype
    everywhere = "propagate_nan=tl.PropagateNan.ALL"
    limits: Any = dict(y=plain(1, lambda v: -1 - np.abs(v)), z=plain(2, np.abs))
    for name, of in {"minimum": smaller, "maximum": larger}.items():
        yield from over((F16, BF16, F32, *INTEGERS), f"tl.{name}(x, y)", of, result)
        yield from over((F64,), f"tl.{name}(x, y)", of, x=plain(0), y=plain(1))  # the sign of zero is unspecified
        yield from over(FLOATS, f"tl.{name}(x, y, {everywhere})", propagating(of), result)
    yield from over(FLOATS, "tl.clamp(x, y, z)", clamped, result, **limits)
    yield from over(FLOATS, f"tl.clamp(x, y, z, {everywhere})", propagating(clamped), result, **limits)
    # compiles to one instruction, which returns the limit for NaN
    unit = lambda x: np.where(np.isnan(x), 1, np.clip(x, -1, 1))
    yield from over((F16, F32), "tl.clamp(x, -1.0, 1.0)", unit, F32)
    yield from over((*numbers, BOOL), "tl.where(x == y, x, y)", lambda x, y: np.where(x == y, x, y))
    high = elementwise(lambda a, b, width: (a % 2**width) * (b % 2**width) >> width)
    for dtype in (I32, I64, U32, U64):
        width = torch.iinfo(dtype).bits
        yield from over((dtype,), "tl.umulhi(x, y)", lambda x, y, width=width: high(x, y, width))
    dividends = plain(0, lambda v: v % 1000 + 1)
    yield from over(
        (I32, I64, U32), "tl.cdiv(x, y)", lambda x, y: -(-x // y), x=dividends, y=plain(1, lambda v: v % 9 + 1)
    )


@parametrize(arithmetic())
def test_arithmetic(case, check):
    check(case)


def functions() -> Iterator[Case]:
    """Yield math functions, with the tolerance of the approximate instructions; fp64 is more accurate."""
    ranges: dict[str, tuple[Callable[..., Any], float, float]] = {
        "exp": (np.exp, -10, 10),
        "exp2": (np.exp2, -10, 10),
        "log": (np.log, 1e-3, 1e3),
        "log2": (np.log2, 1e-3, 1e3),
        "sin": (np.sin, -10, 10),
        "cos": (np.cos, -10, 10),
        "sqrt": (np.sqrt, 0, 1e4),
        "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-3, 1e4),
        "erf": (np.vectorize(math.erf), -3, 3),
        "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -10, 10),
    }
    for name, (of, low, high) in ranges.items():
        for dtype in (F32, F64):
            x = narrow(np.linspace(low, high, LANES), dtype)
            near = 2e-6 if dtype == F32 else 1e-14
            yield Case(f"tl.{name}(x)", (x,), narrow(of(wide(x)), dtype), near, near / 4)
    for name, of in {"floor": np.floor, "ceil": np.ceil}.items():
        whole = plain(0, lambda v: np.append(v[:-2], [2.5, -0.5]))
        yield from over((F32, F64), f"tl.{name}(x)", of, x=whole)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0**-140])
    flushed = {
        "exp2(x)": [1, 1, math.inf, 0, math.nan, 2, 0.5, 1],
        "sqrt(x)": [0, -0.0, math.inf, *[math.nan] * 2, 1, math.nan, 0],
    }
    flushed["rsqrt(x)"] = [math.inf, -math.inf, 0, *[math.nan] * 2, 1, math.nan, math.inf]
    for call, results in flushed.items():
        yield Case(f"tl.{call}", (edges,), torch.tensor(results))
    x = torch.linspace(0.1, 0.9, LANES)
    for name, of in {"tanh": torch.tanh, "erf": torch.erf, "rsqrt": torch.rsqrt, "expm1": torch.expm1}.items():
        yield Case(f"libdevice.{name}(x)", (x,), of(x), 1e-6)
    yield Case("libdevice.pow(x, y)", (x, 3 - 5 * x), x ** (3 - 5 * x), 1e-6)
    numbers = sample(I32)
    yield Case("libdevice.popc(x)", (numbers,), narrow([(v % 2**32).bit_count() for v in wide(numbers)], I32))
    yield Case("libdevice.clz(x)", (numbers,), narrow([32 - (v % 2**32).bit_length() for v in wide(numbers)], I32))
    a, b, c = (sample(F32, i, special=False) for i in range(3))
    exact = [
        Fraction(i) * Fraction(j) + Fraction(k) for i, j, k in zip(*map(torch.Tensor.tolist, (a, b, c)), strict=True)
    ]
    yield Case("libdevice.fma_rz(x, y, z)", (a, b, c), narrow([rounded(e, F32, True) for e in exact], F32))


@parametrize(functions())
def test_functions(case, check):
    check(case)


def promotions() -> Iterator[Case]:
    """Yield operations on two dtypes, whose values are computed in the promoted dtype."""
    pairs = [
        (F16, F32, F32), (BF16, F32, F32), (BF16, F16, F16), (F16, F64, F64), (I32, F32, F32), (I64, F16, F16),
        (I32, BF16, F32), (I8, I32, I32), (I8, U8, U8), (I16, U8, I16), (I32, U32, U32), (I64, U32, I64),
        (BOOL, I32, I32), (BOOL, F32, F32), (I8, I64, I64), (U16, U64, U64),
    ]  # fmt: skip
    for one, two, result in pairs:
        x, y = sample(one, special=False), sample(two, 1, special=False)
        a, b = (wide(narrow(wide(v), result)) for v in (x, y))
        yield Case("x + y", (x, y), narrow(a + b, result))
        yield Case("y * x", (x, y), narrow(b * a, result))
        yield Case("x < y", (x, y), narrow(a < b, BOOL))
    for dtype in (F16, BF16, F32, F64):
        x = sample(dtype, special=False)
        yield Case("x * 2", (x,), narrow(2 * wide(x), dtype))
        yield Case("0.1 + x", (x,), narrow(wide(narrow([0.1], dtype)) + wide(x), dtype))
        yield Case("1 - x", (x,), narrow(1 - wide(x), dtype))
        yield Case("x > 0.1", (x,), narrow(wide(x) > float(torch.tensor(0.1)), BOOL))
        # float arguments and the result of a tensor condition are fp32, not Python numbers
        to = at_least_fp32(dtype)
        scalar = float(torch.tensor(0.1))
        yield Case("x * y", (x, 0.1), narrow(wide(x) * scalar, to))
        yield Case("x * (0.1 if y > 2 else 0.5)", (x, 3), narrow(wide(x) * scalar, to))
        yield Case("x * y", (x, 3), narrow(wide(x) * 3, F32 if dtype == BF16 else dtype))
        yield Case("x * y", (x, 1), narrow(wide(x), dtype))  # Triton specializes on 1
        yield Case("1 / x", (x,), narrow(1 / wide(x), to), 3e-7)
    for dtype in (I8, U8, I32, U64):
        x = sample(dtype)
        yield Case("x * 2 + 100", (x,), narrow(2 * wide(x) + 100, dtype))
        yield Case("x + 0.5", (x,), narrow(wide(x).astype(np.float32) + 0.5, F32))
        yield Case("x + y", (x, 2**31 + 5), narrow(wide(x) + 2**31 + 5, U64 if dtype == U64 else I64))
    yield Case("x + 4000000000", (sample(U32),), narrow(wide(sample(U32)) + 4000000000, U32))


@parametrize(promotions())
def test_promotions(case, check):
    check(case)


def between(dtype: torch.dtype) -> np.ndarray:
    """Return numbers halfway between neighbours of a float type, where rounding breaks ties."""
    codes = np.arange(2**7 - 1) if dtype in FP8 else np.random.default_rng(0).integers(0, 2**15, 64)
    code = torch.from_numpy(codes.astype(f"u{dtype.itemsize}"))
    lower, upper = (narrow(wide(code) + i, code.dtype).view(dtype).double().numpy() for i in (0, 1))
    return (lower + upper) / 2


def float_sample(dtype: torch.dtype) -> Tensor:
    """Return numbers that are hard to convert."""
    rng = np.random.default_rng(0)
    if dtype in FP8:
        codes = torch.arange(256)
        if dtype == E5M2:  # the compiled conversion turns infinity and NaN into large bf16 numbers
            codes = torch.where(codes & 0x7C == 0x7C, 0, codes)
        return codes.to(U8).view(dtype)
    if dtype.itemsize == 2:
        return torch.from_numpy(rng.integers(0, 2**16, 512).astype(np.uint16)).view(dtype)
    ties = np.concatenate([between(d) for d in (*FP8, F16, BF16)])
    large = np.array(
        [2.0**k + d for k in (7, 8, 15, 16, 31, 32) for d in (-1, -0.5, 0, 0.5)] + [2.0**63, 2.0**64, 1e30]
    )
    limits = np.array(
        [448, 464, 465, 57344, 61440, 61441, 65504, 65519.99, 65520, 3.4e38, math.inf, math.nan, 2.0**-140]
    )
    values = np.concatenate([ties, ties * (1 + 2.0**-20), large, limits, rng.standard_normal(64)])
    if dtype == F64:
        values = np.append(values, [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-24 + 2.0**-50, 1e300])
    values = np.concatenate([values, -values])
    return torch.from_numpy(np.pad(values, (0, 2048 - len(values)))).to(dtype)


def converted(value: Any, source: torch.dtype, to: torch.dtype) -> Any:
    if to == BOOL:
        return value != 0
    if to.is_floating_point:
        return rounded(value, to)
    if not source.is_floating_point:
        return value
    width = max(torch.iinfo(to).bits, 16)  # int8 is the low half of int16
    low, high = (0, 2**width - 1) if to in UNSIGNED else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    if math.isnan(value):
        return 2 ** (width - 1) if width == 64 or source == F64 else 0
    return low if value <= low else high if value >= high else int(value)


def casts() -> Iterator[Case]:
    for source in (*FLOATS, *INTEGERS, BOOL, *FP8):
        x = float_sample(source) if source.is_floating_point else sample(source)
        targets = [F16, BF16, F32] if source in FP8 else [*FLOATS, *INTEGERS, BOOL]
        targets += [d for d in FP8 if source in (F16, BF16, F32)]
        results = [narrow([converted(v, source, to) for v in wide(x).tolist()], to) for to in targets if to != source]
        expression = ", ".join(f"x.to(tl.{name_of(to)})" for to in targets if to != source)
        yield Case(expression, (x,), tuple(results))
    x = float_sample(F32)
    for to in (F16, BF16, E5M2):
        truncated = [v if math.isinf(v) else rounded(v, to, toward_zero=True) for v in wide(x).tolist()]
        yield Case(f"x.to(tl.{name_of(to)}, fp_downcast_rounding='rtz')", (x,), narrow(truncated, to))
    for one, two in ((F32, I32), (F32, U32), (F16, I16), (BF16, U16), (F64, I64), (E4M3, U8), (E5M2, I8), (I32, U32)):
        raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 64 * one.itemsize).astype(np.uint8))
        for source, to in ((one, two), (two, one)):
            yield Case(f"x.to(tl.{name_of(to)}, bitcast=True)", (raw.view(source),), raw.view(to))


@parametrize(casts())
def test_casts(case, check):
    check(case)


# Blocks


def shapes() -> Iterator[Case]:
    x, y, cube, line, other = block(4, 16), block(4, 16, seed=1), block(2, 4, 8), block(32), block(32, seed=1)
    for expression in ("x.T", "tl.trans(x)", "tl.trans(x, 1, 0)", "x.permute(1, 0)"):
        yield Case(expression, (x,), x.T)
    yield Case("tl.permute(x, (2, 0, 1))", (cube,), cube.permute(2, 0, 1))
    yield Case("tl.reshape(x, (8, 2, 4))", (x,), x.reshape(8, 2, 4))
    yield Case("x.reshape(64)", (x,), x.ravel())
    yield Case("tl.ravel(x)", (cube,), cube.ravel())
    yield Case("tl.expand_dims(x, 1)", (x,), x[:, None])
    yield Case("x.expand_dims(-1)", (x,), x[..., None])
    yield Case("tl.expand_dims(x, (0, 2))", (line,), line[None, :, None])
    yield Case("x[:, None, :]", (x,), x[:, None])
    yield Case("x[None, :] + y[:, None]", (line, other), line + other[:, None])
    yield Case("tl.broadcast_to(x, (4, 32))", (line[None],), line.expand(4, 32))
    yield Case("tl.broadcast(x, y)", (line[None], block(4, 1)), (line.expand(4, 32), block(4, 1).expand(4, 32)))
    yield Case("tl.join(x, y)", (x, y), torch.stack([x, y], -1))
    yield Case("tl.interleave(x, y)", (x, y), torch.stack([x, y], -1).reshape(4, 32))
    yield Case("tl.split(x)", (block(8, 2),), block(8, 2).unbind(-1))
    yield Case("tl.split(tl.join(x, y))", (x, y), (x, y))
    yield Case("tl.flip(x, 0)", (line,), line.flip(0))
    yield Case("tl.flip(x, 1)", (x.int(),), x.int().flip(1))
    yield Case("x.flip(1)", (cube.half(),), cube.half().flip(1))
    # the result may be reordered, so it is sorted
    yield Case("tl.sort(tl.cat(x, y, can_reorder=True))", (line, other), torch.cat([line, other]).sort().values)
    yield Case("tl.sort(tl.view(x, 64))", (x,), x.ravel().sort().values)
    yield Case("tl.sum(x, 0, keep_dims=True).item()", (line,), line.sum())
    yield Case("tl.zeros((2, 4), tl.bfloat16)", (), torch.zeros(2, 4, dtype=BF16))
    yield Case("tl.zeros_like(x)", (x.short(),), torch.zeros(4, 16, dtype=I16))
    yield Case("tl.full((8,), 3, tl.int64)", (), torch.full((8,), 3))
    yield Case("tl.full((8,), x, tl.float16)", (0.1,), torch.full((8,), 0.1, dtype=F16))
    yield Case("tl.arange(8, 24)", (), torch.arange(8, 24, dtype=I32))
    yield Case("tl.cast(x, tl.int8)", (x,), x.to(I8))
    selected = torch.where(line[:, None] > other, line[:, None], 0)
    yield Case("tl.where(x[:, None] > y[None, :], x[:, None], 0)", (line, other), selected)
    for axis, dtype in ((1, I32), (0, I64)):
        index = block(4, 16, dtype=dtype, low=0, high=x.shape[axis])
        yield Case(f"tl.gather(x, y, {axis})", (x, index), x.gather(axis, index.long()))
    steps = [0, 0, 1, 7, 2, 5, 8, 16, 3, 19, 6, 14, 9, 9, 17, 17]
    yield Case("tl.map_elementwise(collatz, x)", (torch.arange(16, dtype=I32),), torch.tensor(steps, dtype=I32))
    # two 4-bit numbers per byte, the lower half first
    packed = sample(I8)
    halves = [wide(packed) % 16, wide(packed) % 256 // 16]
    yield Case("tl.interleave(x & 15, (x >> 4) & 15)", (packed,), narrow(np.stack(halves, -1).ravel(), I8))
    signs = [(half + 8) % 16 - 8 for half in halves]
    yield Case("tl.interleave(x << 4 >> 4, x >> 4)", (packed,), narrow(np.stack(signs, -1).ravel(), I8))
    words = sample(I32)
    nibbles = narrow(np.stack([wide(words) % 2**32 >> 4 * i & 15 for i in range(8)], -1).ravel(), I32)
    yield Case("tl.ravel((x[:, None] >> (tl.arange(0, 8) * 4)[None, :]) & 15)", (words,), nibbles)
    grid = torch.arange(16, dtype=I32)
    moved = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15], dtype=I32)
    yield Case("tl.swizzle2d(x // 4, x % 4, 4, 4, 2)", (grid,), (moved // 4, moved % 4))


@pytest.mark.filterwarnings("ignore:view is deprecated")
@parametrize(shapes())
def test_shapes(case, check):
    check(case)


def summed(dtype: torch.dtype) -> torch.dtype:
    if dtype == BOOL or (dtype in UNSIGNED and dtype.itemsize < 4):
        return U32
    return I32 if dtype in SIGNED and dtype.itemsize < 4 else dtype


def compared(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else F32 if dtype.is_floating_point else I32


def reductions() -> Iterator[Case]:
    axes: dict[str, dict[str, Any]] = {"0": {"dim": 0}, "1": {"dim": 1}, "None": {"dim": (0, 1)}}
    axes |= {f"{axis}, keep_dims=True": {**where, "keepdim": True} for axis, where in axes.items()}
    for dtype in (*FLOATS, *INTEGERS, BOOL):
        x = block(4, 32, dtype=dtype, high=9 if dtype != BOOL else 2)
        for axis, where in axes.items() if dtype in (F32, I8) else list(axes.items())[1:3]:
            yield Case(f"tl.sum(x, {axis})", (x,), narrow(x.double().sum(**where), summed(dtype)))
            for name in ("max", "min") if dtype != BOOL else ():
                found = getattr(torch, f"a{name}")(x.double(), **where)
                yield Case(f"tl.{name}(x, {axis})", (x,), narrow(found, compared(dtype)))
        if dtype in INTEGERS:
            folded = functools.reduce(np.bitwise_xor, wide(x)), functools.reduce(np.bitwise_or, wide(x))
            yield Case("tl.xor_sum(x, 0)", (x,), narrow(folded[0], dtype))
            yield Case("tl.reduce_or(x, 0)", (x,), narrow(folded[1], dtype))
    x = block(8, 32, high=-5)  # many ties
    for name in ("max", "min"):
        place = torch.from_numpy(getattr(np, f"arg{name}")(x.numpy(), 1)).int()  # the first
        value = getattr(x, name)(1).values
        yield Case(f"tl.arg{name}(x, 1)", (x,), place)
        yield Case(f"x.arg{name}(1, keep_dims=True)", (x.to(BF16),), place[:, None])
        yield Case(f"tl.{name}(x, 1, return_indices=True)", (x,), (value, place))
        yield Case(f"tl.{name}(x, 1, return_indices=True)", (x.to(I8),), (value.to(I8), place))
        shuffled = torch.randperm(32, generator=torch.Generator().manual_seed(0)).int()
        place = torch.tensor(getattr(np, f"arg{name}")(shuffled.numpy()), dtype=I32)
        yield Case(f"tl.arg{name}(x, 0, tie_break_left=False)", (shuffled,), place)
        missing = torch.where(torch.rand(8, 32, generator=torch.Generator().manual_seed(0)) < 0.3, math.nan, x)
        number = getattr(np, f"nan{name}")(missing.numpy(), 1)
        yield Case(f"tl.{name}(x, 1)", (missing,), torch.from_numpy(number))
    yield Case("tl.sum(x, 1, dtype=tl.int64)", (x.int() * 2**28,), (x.long() * 2**28).sum(1))
    y = block(8, 32, dtype=I32, seed=1)
    yield Case("tl.reduce((x, y), 1, larger_and_total)", (x, y), (x.max(1).values, y.sum(1).int()))
    yield Case(
        "tl.reduce((x, y), 0, larger_and_total, keep_dims=True)", (x, y), (x.max(0, True).values, y.sum(0, True).int())
    )
    z = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    around = z.var(1, correction=0) * 32
    count = torch.full((8,), 32.0)
    yield Case("tl.reduce((x, tl.zeros_like(x), x * 0 + 1), 1, welford)", (z,), (z.mean(1), around, count), 1e-5, 1e-6)
    yield Case("tl.softmax(x)", (z[0],), z[0].softmax(0), 2e-6)
    yield Case("tl.softmax(x, 1, keep_dims=True)", (z,), z.softmax(1), 2e-6)


@parametrize(reductions())
def test_reductions(case, check):
    check(case)


def scans() -> Iterator[Case]:
    for dtype in (F16, BF16, F32, F64, I8, U8, I32, I64):
        x = block(4, 32, dtype=dtype)
        to = F32 if dtype == BF16 else summed(dtype)
        for axis in (0, 1):
            whole = x.double().cumsum(axis)
            back = x.double().flip(axis).cumsum(axis).flip(axis)
            yield Case(f"tl.cumsum(x, {axis})", (x,), narrow(whole, to))
            yield Case(f"tl.cumsum(x, {axis}, reverse=True)", (x,), narrow(back, to))
    signs = block(4, 32, low=0, high=2) * 3 - 2  # 1 and -2
    for dtype in (F32, I32, BF16):
        product = signs.double()[:, :16].cumprod(1)
        x = signs[:, :16].to(dtype)
        yield Case("tl.cumprod(x, 1)", (x,), narrow(product, F32 if dtype == BF16 else dtype))
    factors, terms = block(4, 16, dtype=I32, low=-1, high=3), block(4, 16, dtype=I32, seed=1)
    state, states = torch.zeros(4, dtype=I32), []
    for step in range(16):
        state = state * factors[:, step] + terms[:, step]
        states.append(state)
    order = torch.stack(states, 1)
    yield Case("tl.associative_scan((x, y), 1, then)", (factors, terms), (factors.cumprod(1).int(), order))
    backwards = (factors.flip(1), terms.flip(1))
    expected = (factors.cumprod(1).int().flip(1), order.flip(1))
    yield Case("tl.associative_scan((x, y), 1, then, reverse=True)", backwards, expected)
    lows = torch.tensor([-3, 5, -1, 4, 9, 2, 0, 7], dtype=I32)
    found = torch.tensor([-3, 5, 5, 4, 4, 2, 2, 2], dtype=I32)
    yield Case("tl.associative_scan(x, 0, least_positive)", (lows,), found)


@parametrize(scans())
def test_scans(case, check):
    check(case)


def sorts() -> Iterator[Case]:
    for dtype in (F16, F32, F64, I8, I16, I32, I64, U8):
        x = narrow(torch.from_numpy(np.random.default_rng(0).permutation(100)[:64].reshape(4, 16) - 40.0), dtype)
        yield Case("tl.sort(x)", (x,), x.sort(-1).values)
        yield Case("tl.sort(x, descending=True)", (x,), x.sort(-1, descending=True).values)
    x = block(4, 32)
    yield Case("tl.sort(tl.ravel(x), descending=True)", (x,), x.ravel().sort(descending=True).values)
    yield Case("tl.topk(x, 4)", (x,), x.topk(4, -1).values)
    yield Case("tl.topk(x, 8)", (x.int()[0],), x.int()[0].topk(8, -1).values)
    bitonic = torch.cat([x[0, :16].sort().values, x[0, 16:].sort(descending=True).values])
    yield Case("tl.bitonic_merge(x)", (bitonic,), bitonic.sort().values)
    counted = block(256, dtype=I32, low=0, high=16)
    yield Case("tl.histogram(x, 16)", (counted,), counted.bincount(minlength=16).int())
    masked = counted[block(256, seed=1) > 0].bincount(minlength=32).int()
    yield Case("tl.histogram(x, 32, mask=y > 0)", (counted, block(256, seed=1)), masked)


@parametrize(sorts())
def test_sorts(case, check):
    check(case)


def philox(seed: int, offset: int, rounds: int = 10) -> list[int]:
    mask = 2**32 - 1
    counter, key = [offset & mask, offset >> 32 & mask, 0, 0], [seed & mask, seed >> 32 & mask]
    for _ in range(rounds):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & mask, a >> 32 ^ counter[3] ^ key[1], a & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    return counter


def randoms() -> Iterator[Case]:
    offsets = torch.arange(LANES, dtype=I32) * 12345
    far = offsets.long() * 2**20
    for seed in (0, 42, 2**31 - 1, 2**40 + 3):
        four = four_of(seed, offsets)
        yield Case("tl.randint(y, x)", (offsets, seed), four[0])
        yield Case("tl.randint4x(y, x)", (offsets, seed), tuple(four))
    yield Case("tl.randint(y, x)", (far, 42), narrow([philox(42, o)[0] for o in far.tolist()], U32))
    yield Case(
        "tl.randint(y, x, n_rounds=5)", (offsets, 42), narrow([philox(42, o, 5)[0] for o in offsets.tolist()], U32)
    )
    integers = [torch.from_numpy(c.numpy().view(np.int32)) for c in four_of(42, offsets)]
    uniform = [torch.where(i < 0, -1 - i, i).float() * 4.6566127342e-10 for i in integers]
    yield Case("tl.rand(y, x)", (offsets, 42), uniform[0])
    yield Case("tl.rand4x(y, x)", (offsets, 42), tuple(uniform))
    radius = (-2 * uniform[0].clamp(min=1e-7).double().log()).sqrt()
    yield Case(
        "tl.randn(y, x)", (offsets, 42), (radius * (2 * math.pi * uniform[1].double()).cos()).float(), 1e-4, 1e-5
    )


def four_of(seed: int, offsets: Tensor) -> list[Tensor]:
    return [narrow(column, U32) for column in zip(*[philox(seed, o) for o in offsets.tolist()], strict=True)]


@parametrize(randoms())
def test_random_numbers(case, check):
    check(case)


def dots() -> Iterator[Case]:
    for dtype, size in ((F16, 16), (F16, 64), (BF16, 32), (F32, 32), (E4M3, 32), (E5M2, 64), (I8, 32), (F64, 16)):
        a, b = block(size, size, dtype=dtype), block(size, size, dtype=dtype, seed=1)
        to = I32 if dtype == I8 else at_least_fp32(dtype)
        product = a.double() @ b.double()
        acc = block(size, size, dtype=to, seed=2)
        options = ", input_precision='ieee'" if dtype == F32 else ""
        typed = f", out_dtype=tl.{name_of(to)}"
        yield Case(f"tl.dot(x, y{options}{typed})", (a, b), product.to(to))
        yield Case(f"tl.dot(x, y, acc=z{options}{typed})", (a, b, acc), (product + acc.double()).to(to))
    half = block(32, 32, dtype=F16), block(32, 32, dtype=F16, seed=1)
    yield Case("tl.dot(x, y, out_dtype=tl.float16)", half, (half[0].double() @ half[1].double()).half())
    yield Case("tl.dot(x, y.T)", half, half[0].float() @ half[1].float().T)
    batch = block(2, 32, 16, dtype=F16), block(2, 16, 32, dtype=F16, seed=1)
    yield Case("tl.dot(x, y)", batch, batch[0].float() @ batch[1].float())
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 32, generator=generator), torch.randn(32, 32, generator=generator)
    yield Case("tl.dot(x, y, input_precision='ieee')", (a, b), a @ b, 1e-5, 1e-5)
    yield Case("tl.dot(x, y, input_precision='tf32x3')", (a, b), a @ b, 1e-5, 1e-5)
    yield Case("tl.dot(x, y, input_precision='tf32')", (a, b), a @ b, 4e-3, 2e-2)
    short = [narrow([rounded(v, F16) for v in t.ravel().tolist()], F32).reshape(32, 32) for t in (a, b)]  # 10 bits
    yield Case("tl.dot(x, y)", tuple(short), short[0] @ short[1], 1e-5, 1e-5)
    yield Case("tl.dot(x, y)", (a.to(BF16), b.to(BF16)), a.to(BF16).float() @ b.to(BF16).float(), 1e-5, 1e-5)


@parametrize(dots())
def test_dot(case, check):
    check(case)


def scaled_dots() -> Iterator[Case]:
    """Yield scaled products; blocks of 32 elements along K share a power-of-two scale."""
    rows, depth = 64, 128
    rng = np.random.default_rng(0)
    codes = [torch.from_numpy(rng.integers(0, 256, (rows, depth // 2)).astype(np.uint8)) for _ in range(2)]
    scales = [torch.from_numpy(rng.integers(124, 131, (rows, depth // 32)).astype(np.uint8)) for _ in range(2)]
    factors = [(2.0 ** (s.double() - 127)).repeat_interleave(32, 1) for s in scales]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F64)
    values = torch.cat([values, -values])
    four = [torch.stack([values[c.long() & 15], values[c.long() >> 4]], -1).reshape(rows, depth) for c in codes]
    a, b = block(rows, depth), block(rows, depth, seed=1)
    acc = block(rows, rows)
    for name, dtype in {"e4m3": E4M3, "e5m2": E5M2}.items():
        x, y = a.to(dtype), b.to(dtype).T.contiguous()
        product = (a.double() * factors[0]) @ (b.double() * factors[1]).T
        yield Case(f"tl.dot_scaled(x, z, '{name}', y, w, '{name}')", (x, y, *scales), product.float())
        plain_product = a.double() @ b.double().T
        yield Case(
            f"tl.dot_scaled(x, None, '{name}', y, None, '{name}', acc=z)", (x, y, acc), (plain_product + acc).float()
        )
    x, y = codes[0], codes[1].T.contiguous()
    product = (four[0] * factors[0]) @ (four[1] * factors[1]).T
    yield Case("tl.dot_scaled(x, z, 'e2m1', y, w, 'e2m1')", (x, y, *scales), product.float())
    y = b.to(BF16).T.contiguous()
    product = (four[0] * factors[0]) @ b.double().T
    yield Case("tl.dot_scaled(x, z, 'e2m1', y, None, 'bf16')", (x, y, scales[0]), product.float())


@parametrize(scaled_dots())
def test_dot_scaled(case, check):
    check(case)


# Memory


UPDATES: dict[str, tuple[Callable[..., Any], tuple[torch.dtype, ...]]] = {
    "add": (lambda old, new: old + new, (I32, I64, U32, F16, BF16, F32, F64)),
    "max": (max, (I32, I64, U32, U64, F32, F64)),
    "min": (min, (I32, I64, U32, U64, F32, F64)),
    "and": (lambda old, new: old & new, (I32, I64, U32)),
    "or": (lambda old, new: old | new, (I32, I64, U32)),
    "xor": (lambda old, new: old ^ new, (I32, U64)),
    "xchg": (lambda old, new: new, (I32, I64, F32)),
}
UPDATE = """
i = tl.program_id(0) * 32 + tl.arange(0, 32)
value = tl.load(x + i)
old = tl.atomic_{name}(separate + i, value, mask=i % 32 != 5)
tl.store(before + i, old, mask=i % 32 != 5)
{shared}"""


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, d) for name, (_, dtypes) in UPDATES.items() for d in dtypes], ids=str
)
def test_atomics(name, dtype, make_kernel, device):
    """Four programs update separate elements, one per lane, and four shared elements."""
    update, _ = UPDATES[name]
    x, start, common = block(128, dtype=dtype), block(128, dtype=dtype, seed=1), block(4, dtype=dtype, seed=2)
    shared = f'tl.atomic_{name}(common + i % 4, value, mask=value != 3, sem="relaxed")' if name != "xchg" else ""
    given = [t.clone().to(device) for t in (x, start, torch.zeros_like(x), common)]
    make_kernel("x, separate, before, common", UPDATE.format(name=name, shared=shared))[(4,)](*given)
    on = np.arange(128) % 32 != 5
    olds, news = wide(start), wide(x)
    updated = [update(old, new) if active else old for old, new, active in zip(olds, news, on, strict=True)]
    assert_near(given[1].cpu(), narrow(updated, dtype))
    assert_near(given[2].cpu(), narrow(np.where(on, olds, 0), dtype))
    if shared:
        columns = [[v for v in news[k::4] if v != 3] for k in range(4)]
        folded = [functools.reduce(update, column, old) for column, old in zip(columns, wide(common), strict=True)]
        assert_near(given[3].cpu(), narrow(folded, dtype))
