"""Every operation of triton.language, over the dtypes, against exact arithmetic or torch.

Rows are data: an expression, its inputs and what it gives, to the last bit unless a tolerance stands there. Without a
GPU the rows are interpreted; with one they are compiled, and say of the hardware what they say of the interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.tools.tensor_descriptor import TensorDescriptor

import tilewright
from tilewright.errors import KernelStopped

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
    share = tl.where(weight == 0, 0.0, weight_b / weight)
    apart = mean_b - mean_a
    return mean_a + apart * share, square_a + square_b + apart * apart * weight_a * share, weight


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

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
I8, I16, I32, I64 = torch.int8, torch.int16, torch.int32, torch.int64
U8, U16, U32, U64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
BOOL = torch.bool
FLOATS, FP8 = (F16, BF16, F32, F64), (E4M3, E5M2)
SIGNED, UNSIGNED = (I8, I16, I32, I64), (U8, U16, U32, U64)
INTEGERS = SIGNED + UNSIGNED
MANTISSA = {E4M3: 3, E5M2: 2, F16: 10, BF16: 7, F32: 23, F64: 52}  # stored bits
NAMES = {E4M3: "float8e4nv", E5M2: "float8e5", BOOL: "int1"}  # in tl, where it is not torch's
LANES = 128


def name_of(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, eq=False)
class Case:
    expression: str
    inputs: tuple[Any, ...]  # x, y, z and w: tensors are loaded, numbers are arguments
    expected: Tensor | tuple[Tensor, ...]
    rtol: float = 0.0
    atol: float = 0.0

    @property
    def name(self) -> str:
        kinds = [name_of(i.dtype) if isinstance(i, Tensor) else str(i) for i in self.inputs]
        return f"{self.expression[:60]}-{'-'.join(kinds)}"


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Callable[[str, str], Any]:
    """A kernel from its parameters and body: the source of a kernel is read from a file."""
    folder = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def write(parameters: str, body: str) -> Any:
        path = folder / f"kernel_{len(list(folder.glob('*.py')))}.py"
        path.write_text(HEADER.format(parameters=parameters) + "".join(f"    {line}\n" for line in body.splitlines()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    return write


@pytest.fixture
def check(written, device) -> Callable[[Case], None]:
    """Compute a case in one program and compare: types, shapes and values."""

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
        kernel = written(", ".join([*names, *(f"out_{r}" for r in results)]), "\n".join(lines))
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


def parametrised(cases: Iterator[Case] | list[Case]) -> Any:
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.name)


# Inputs and exact arithmetic


def sample(dtype: torch.dtype, which: int = 0, special: bool = True) -> Tensor:
    """Random numbers; the first of x (which=0) and y (which=1) are all pairs of special ones."""
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
    """Numbers that lose nothing: fp64, or Python's integers."""
    if tensor.dtype.is_floating_point:
        return tensor.double().numpy()
    return np.array(tensor.numpy().tolist(), bool if tensor.dtype == BOOL else object)


def narrow(values: Any, dtype: torch.dtype) -> Tensor:
    """Integers wrap around, floats round to nearest."""
    if dtype == BOOL:
        return torch.from_numpy(np.asarray(values).astype(bool))
    if dtype.is_floating_point:
        return torch.from_numpy(np.asarray(values).astype(np.float64)).to(dtype)
    width = torch.iinfo(dtype).bits
    return torch.from_numpy(np.array([int(v) % 2**width for v in values], f"u{width // 8}")).view(dtype)


def rounded(value: Any, dtype: torch.dtype, toward_zero: bool = False) -> float:
    """An exact number in a float type. The fp8s saturate."""
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


def over(dtypes, expression, reference, result: Any = None, rtol: float = 0.0, **inputs: Any) -> Iterator[Case]:
    """One case a dtype; inputs that are not given as functions of the dtype are samples."""
    count = max("xyz".index(n) for n in re.findall(r"\b[xyz]\b", expression)) + 1
    for dtype in dtypes:
        given = tuple(inputs[n](dtype) if n in inputs else sample(dtype, i) for i, n in enumerate("xyz"[:count]))
        to = result(dtype) if callable(result) else result or dtype
        with np.errstate(all="ignore"):
            yield Case(expression, given, narrow(reference(*map(wide, given)), to), rtol)


def each(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return np.frompyfunc(function, function.__code__.co_argcount, 1)


@each
def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@each
def least(a, b):
    return b if a != a else a if b != b else min(a, b, key=lambda v: (v, math.copysign(1, v)))


@each
def most(a, b):
    return b if a != a else a if b != b else max(a, b, key=lambda v: (v, math.copysign(1, v)))


@each
def fused(a, b, c):
    """a * b + c, rounded once."""
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
    return least(most(x, y), z).astype(float)


def plain(which: int, change: Callable[[np.ndarray], Any] = lambda v: v) -> Callable[[torch.dtype], Tensor]:
    """A sample without special numbers, changed."""
    return lambda dtype: narrow(change(wide(sample(dtype, which, special=False))), dtype)


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
    for name, of in {"minimum": least, "maximum": most}.items():
        yield from over((F16, BF16, F32, *INTEGERS), f"tl.{name}(x, y)", of, result)
        yield from over((F64,), f"tl.{name}(x, y)", of, x=plain(0), y=plain(1))  # of zeros it gives either
        yield from over(FLOATS, f"tl.{name}(x, y, {everywhere})", propagating(of), result)
    yield from over(FLOATS, "tl.clamp(x, y, z)", clamped, result, **limits)
    yield from over(FLOATS, f"tl.clamp(x, y, z, {everywhere})", propagating(clamped), result, **limits)
    # one instruction, which gives the limit where there is no number
    unit = lambda x: np.where(np.isnan(x), 1, np.clip(x, -1, 1))
    yield from over((F16, F32), "tl.clamp(x, -1.0, 1.0)", unit, F32)
    yield from over((*numbers, BOOL), "tl.where(x == y, x, y)", lambda x, y: np.where(x == y, x, y))
    high = each(lambda a, b, width: (a % 2**width) * (b % 2**width) >> width)
    for dtype in (I32, I64, U32, U64):
        width = torch.iinfo(dtype).bits
        yield from over((dtype,), "tl.umulhi(x, y)", lambda x, y, width=width: high(x, y, width))
    some = plain(0, lambda v: v % 1000 + 1)
    yield from over((I32, I64, U32), "tl.cdiv(x, y)", lambda x, y: -(-x // y), x=some, y=plain(1, lambda v: v % 9 + 1))


@parametrised(arithmetic())
def test_arithmetic(case, check):
    check(case)


def functions() -> Iterator[Case]:
    """As near as the approximating instructions are; fp64 nearer."""
    ranges: dict[str, tuple[Callable[..., Any], float, float]] = {
        "exp": (np.exp, -10, 10), "exp2": (np.exp2, -10, 10), "log": (np.log, 1e-3, 1e3), "log2": (np.log2, 1e-3, 1e3),
        "sin": (np.sin, -10, 10), "cos": (np.cos, -10, 10), "sqrt": (np.sqrt, 0, 1e4), "erf": (np.vectorize(math.erf), -3, 3),
        "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-3, 1e4), "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -10, 10),
    }  # fmt: skip
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


@parametrised(functions())
def test_functions(case, check):
    check(case)


def promotions() -> Iterator[Case]:
    """Which dtype two make, and that the values are computed in it."""
    pairs = [
        (F16, F32, F32), (BF16, F32, F32), (BF16, F16, F16), (F16, F64, F64), (I32, F32, F32), (I64, F16, F16),
        (I32, BF16, F32), (I8, I32, I32), (I8, U8, U8), (I16, U8, I16), (I32, U32, U32), (I64, U32, I64), (BOOL, I32, I32),
        (BOOL, F32, F32), (I8, I64, I64), (U16, U64, U64),
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
        # arguments and what a condition chooses are fp32, not Python's numbers
        to = at_least_fp32(dtype)
        scalar = float(torch.tensor(0.1))
        yield Case("x * y", (x, 0.1), narrow(wide(x) * scalar, to))
        yield Case("x * (0.1 if y > 2 else 0.5)", (x, 3), narrow(wide(x) * scalar, to))
        yield Case("x * y", (x, 3), narrow(wide(x) * 3, F32 if dtype == BF16 else dtype))
        yield Case("x * y", (x, 1), narrow(wide(x), dtype))  # a 1 is compiled in
        yield Case("1 / x", (x,), narrow(1 / wide(x), to), 3e-7)
    for dtype in (I8, U8, I32, U64):
        x = sample(dtype)
        yield Case("x * 2 + 100", (x,), narrow(2 * wide(x) + 100, dtype))
        yield Case("x + 0.5", (x,), narrow(wide(x).astype(np.float32) + 0.5, F32))
        yield Case("x + y", (x, 2**31 + 5), narrow(wide(x) + 2**31 + 5, U64 if dtype == U64 else I64))
    yield Case("x + 4000000000", (sample(U32),), narrow(wide(sample(U32)) + 4000000000, U32))


@parametrised(promotions())
def test_promotions(case, check):
    check(case)


def between(dtype: torch.dtype) -> np.ndarray:
    """Halfway between neighbours of a float type: ties."""
    codes = np.arange(2**7 - 1) if dtype in FP8 else np.random.default_rng(0).integers(0, 2**15, 64)
    code = torch.from_numpy(codes.astype(f"u{dtype.itemsize}"))
    lower, upper = (narrow(wide(code) + i, code.dtype).view(dtype).double().numpy() for i in (0, 1))
    return (lower + upper) / 2


def float_sample(dtype: torch.dtype) -> Tensor:
    """Numbers that are hard to convert."""
    rng = np.random.default_rng(0)
    if dtype in FP8:
        return torch.arange(256).to(U8).view(dtype)
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
    width = max(torch.iinfo(to).bits, 16)  # int8 is what is left of int16
    low, high = (0, 2**width - 1) if to in UNSIGNED else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    if math.isnan(value):
        return 2 ** (width - 1) if width == 64 or source == F64 else 0
    return low if value <= low else high if value >= high else int(value)


def casts() -> Iterator[Case]:
    for source in (*FLOATS, *INTEGERS, BOOL, *FP8):
        x = float_sample(source) if source.is_floating_point else sample(source)
        targets = [F16, BF16, F32] if source in FP8 else [*FLOATS, *INTEGERS, BOOL]
        targets += [d for d in FP8 if source in (F16, BF16, F32)]
        made = [narrow([converted(v, source, to) for v in wide(x).tolist()], to) for to in targets if to != source]
        expression = ", ".join(f"x.to(tl.{name_of(to)})" for to in targets if to != source)
        yield Case(expression, (x,), tuple(made))
    x = float_sample(F32)
    for to in (F16, BF16, E5M2):
        kept = [v if math.isinf(v) else rounded(v, to, toward_zero=True) for v in wide(x).tolist()]
        yield Case(f"x.to(tl.{name_of(to)}, fp_downcast_rounding='rtz')", (x,), narrow(kept, to))
    for one, two in ((F32, I32), (F32, U32), (F16, I16), (BF16, U16), (F64, I64), (E4M3, U8), (E5M2, I8), (I32, U32)):
        raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 64 * one.itemsize).astype(np.uint8))
        for source, to in ((one, two), (two, one)):
            yield Case(f"x.to(tl.{name_of(to)}, bitcast=True)", (raw.view(source),), raw.view(to))


@parametrised(casts())
def test_casts(case, check):
    check(case)


# Blocks


def block(*shape: int, dtype: torch.dtype = F32, low: int = -8, high: int = 9, seed: int = 0) -> Tensor:
    """Whole numbers, small enough for sums and products of them to be exact."""
    low = low if dtype not in UNSIGNED else 0
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape)).to(dtype)


def shapes() -> Iterator[Case]:
    x, y, cube = block(4, 16), block(4, 16, seed=1), block(2, 4, 8)
    line, other = block(32), block(32, seed=1)
    whole: dict[str, tuple[tuple[Tensor, ...], Any]] = {
        "x.T": ((x,), x.T), "tl.trans(x)": ((x,), x.T), "tl.trans(x, 1, 0)": ((x,), x.T), "x[:, None, :]": ((x,), x[:, None]),
        "tl.permute(x, (2, 0, 1))": ((cube,), cube.permute(2, 0, 1)), "x.permute(1, 2, 0)": ((cube,), cube.permute(1, 2, 0)),
        "tl.reshape(x, (8, 2, 4))": ((x,), x.reshape(8, 2, 4)), "x.reshape(64)": ((x,), x.reshape(64)),
        "tl.ravel(x)": ((cube,), cube.ravel()), "tl.expand_dims(x, 1)": ((x,), x[:, None]), "x.expand_dims(-1)": ((x,), x[..., None]),
        "tl.expand_dims(x, (0, 2))": ((line,), line[None, :, None]), "x[None, :] + y[:, None]": ((line, other), line + other[:, None]),
        "tl.broadcast_to(x, (4, 32))": ((line[None],), line.expand(4, 32)), "tl.broadcast(x, y)[0]": ((line[None], block(4, 1)), line.expand(4, 32)),
        "tl.join(x, y)": ((x, y), torch.stack([x, y], -1)), "tl.interleave(x, y)": ((x, y), torch.stack([x, y], -1).reshape(4, 32)),
        "tl.split(x)": ((block(8, 2),), block(8, 2).unbind(-1)), "tl.split(tl.join(x, y))": ((x, y), (x, y)),
        "tl.split(tl.reshape(x, (4, 2, 2)))": ((block(16),), block(16).reshape(4, 2, 2).unbind(-1)),
        "tl.flip(x, 0)": ((line,), line.flip(0)), "tl.flip(x, 1)": ((x,), x.flip(1)), "x.flip(1)": ((cube.half(),), cube.half().flip(1)),
        "tl.sort(tl.cat(x, y, can_reorder=True))": ((line, other), torch.cat([line, other]).sort().values),
        "tl.sort(tl.view(x, 64))": ((x,), x.reshape(64).sort().values), "tl.sum(x, 0, keep_dims=True).item()": ((line,), line.sum()),
        "tl.zeros((2, 4), tl.bfloat16)": ((), torch.zeros(2, 4, dtype=BF16)), "tl.zeros_like(x)": ((x.short(),), torch.zeros(4, 16, dtype=I16)),
        "tl.full((8,), 3, tl.int64)": ((), torch.full((8,), 3)), "tl.full((8,), x, tl.float16)": ((0.1,), torch.full((8,), 0.1, dtype=F16)),
        "tl.arange(8, 24)": ((), torch.arange(8, 24, dtype=I32)), "tl.cast(x, tl.int8)": ((x,), x.to(I8)),
        "tl.where(x[:, None] > y[None, :], x[:, None], 0)": ((line, other), torch.where(line[:, None] > other, line[:, None], 0)),
        "tl.gather(x, y, 1)": ((x, block(4, 16, dtype=I32, low=0, high=16)), x.gather(1, block(4, 16, low=0, high=16).long())),
        "tl.gather(x, y, 0)": ((x, block(4, 16, dtype=I64, low=0, high=4)), x.gather(0, block(4, 16, low=0, high=4).long())),
        "tl.map_elementwise(collatz, x)": ((torch.arange(16, dtype=I32),), torch.tensor([0, 0, 1, 7, 2, 5, 8, 16, 3, 19, 6, 14, 9, 9, 17, 17], dtype=I32)),
    }  # fmt: skip
    for expression, (inputs, expected) in whole.items():
        yield Case(expression, inputs, expected)
    # four bits a number, the lower half first
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
@parametrised(shapes())
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
            yield Case(f"tl.sum(x, {axis})", (x,), narrow_block(x.double().sum(**where), summed(dtype)))
            for name in ("max", "min") if dtype != BOOL else ():
                found = getattr(torch, f"a{name}")(x.double(), **where)
                yield Case(f"tl.{name}(x, {axis})", (x,), narrow_block(found, compared(dtype)))
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


def narrow_block(values: Tensor, dtype: torch.dtype) -> Tensor:
    return narrow(values.numpy().ravel(), dtype).reshape(values.shape)


@parametrised(reductions())
def test_reductions(case, check):
    check(case)


def scans() -> Iterator[Case]:
    for dtype in (F16, BF16, F32, F64, I8, U8, I32, I64):
        x = block(4, 32, dtype=dtype)
        to = F32 if dtype == BF16 else summed(dtype)
        for axis in (0, 1):
            whole = x.double().cumsum(axis)
            back = x.double().flip(axis).cumsum(axis).flip(axis)
            yield Case(f"tl.cumsum(x, {axis})", (x,), narrow_block(whole, to))
            yield Case(f"tl.cumsum(x, {axis}, reverse=True)", (x,), narrow_block(back, to))
    signs = block(4, 32, low=0, high=2) * 3 - 2  # 1 and -2
    for dtype in (F32, I32, BF16):
        product = signs.double()[:, :16].cumprod(1)
        x = signs[:, :16].to(dtype)
        yield Case("tl.cumprod(x, 1)", (x,), narrow_block(product, F32 if dtype == BF16 else dtype))
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


@parametrised(scans())
def test_scans(case, check):
    check(case)


def sorts() -> Iterator[Case]:
    for dtype in (F16, F32, F64, I8, I16, I32, I64, U8):
        x = narrow_block(torch.from_numpy(np.random.default_rng(0).permutation(100)[:64].reshape(4, 16) - 40.0), dtype)
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


@parametrised(sorts())
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


@parametrised(randoms())
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


@parametrised(dots())
def test_dot(case, check):
    check(case)


def scaled_dots() -> Iterator[Case]:
    """Blocks of 32 along K share a power of two."""
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


@parametrised(scaled_dots())
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
old = tl.atomic_{name}(apart + i, value, mask=i % 32 != 5)
tl.store(before + i, old, mask=i % 32 != 5)
{shared}"""


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, d) for name, (_, dtypes) in UPDATES.items() for d in dtypes], ids=str
)
def test_atomics(name, dtype, written, device):
    """Four programs: each lane its own element, and all of them four elements."""
    change, _ = UPDATES[name]
    x, start, together = block(128, dtype=dtype), block(128, dtype=dtype, seed=1), block(4, dtype=dtype, seed=2)
    shared = f'tl.atomic_{name}(together + i % 4, value, mask=value != 3, sem="relaxed")' if name != "xchg" else ""
    given = [t.clone().to(device) for t in (x, start, torch.zeros_like(x), together)]
    written("x, apart, before, together", UPDATE.format(name=name, shared=shared))[(4,)](*given)
    on = np.arange(128) % 32 != 5
    olds, news = wide(start), wide(x)
    updated = [change(old, new) if this else old for old, new, this in zip(olds, news, on, strict=True)]
    assert_near(given[1].cpu(), narrow(updated, dtype))
    assert_near(given[2].cpu(), narrow(np.where(on, olds, 0), dtype))
    if shared:
        columns = [[v for v in news[k::4] if v != 3] for k in range(4)]
        folded = [functools.reduce(change, column, old) for column, old in zip(columns, wide(together), strict=True)]
        assert_near(given[3].cpu(), narrow(folded, dtype))


@dataclass(frozen=True, eq=False)
class Launched:
    """A kernel that stores `expected` to its first argument."""

    kernel: Any
    expected: Tensor
    args: tuple[Any, ...]
    grid: tuple[int, ...]

    def check(self, device: str) -> None:
        def moved(value: Any) -> Any:
            if isinstance(value, TensorDescriptor):
                return TensorDescriptor(
                    value.base.to(device), value.shape, value.strides, value.block_shape, value.padding
                )
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            return value.clone().to(device) if isinstance(value, Tensor) else value

        out = torch.zeros(self.expected.shape, dtype=self.expected.dtype, device=device)
        self.kernel[self.grid](out, *map(moved, self.args))
        assert_near(out.cpu(), self.expected)


MEMORY: list[Launched] = []
LANGUAGE: list[Launched] = []


def gives(rows: list[Launched], expected: Any, *args: Any, grid: tuple[int, ...] = (1,)) -> Callable[[Any], Any]:
    """Enters a kernel; what it gives are int32s unless a tensor says otherwise."""

    def enter(kernel: Any) -> Any:
        whole = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=I32)
        rows.append(Launched(kernel, whole, args, grid))
        return kernel

    return enter


def named(rows: list[Launched]) -> Any:
    function = lambda row: row.kernel if hasattr(row.kernel, "__name__") else row.kernel.fn
    return pytest.mark.parametrize("row", rows, ids=lambda row: function(row).__name__)


@gives(MEMORY, torch.tensor([0, 1, 2, 3, 4, -1, -1, -1, 0, 1, 2, 3, 4, 0, 0, 0.0]), torch.arange(8.0), 5)
@triton.jit
def masked_loads(out, x, n):
    i = tl.arange(0, 8)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=-1))
    tl.store(out + 8 + i, tl.load(x + i, mask=i < n), mask=i < n)


@gives(MEMORY, [3, 0, 7, 0, 5, 6], torch.arange(8, dtype=I32), 7)
@triton.jit
def scalars(out, x, n):
    tl.store(out, tl.load(x + 3))
    tl.store(out + 1, tl.load(x + 4), mask=n < 5)
    tl.store(out + 2, tl.load(x + n, mask=n > 5, other=9))
    end = x + n.to(tl.int64)
    tl.store(out + 4 + tl.arange(0, 2), tl.load(end - 2 + tl.arange(0, 2).to(tl.uint8)))


@gives(MEMORY, torch.tensor([False, True, False, True, True, True]), torch.tensor([True, False, True, False]))
@triton.jit
def truth_values(out, x):
    i = tl.arange(0, 4)
    tl.store(out + i, ~tl.load(x + i))
    tl.store(out + 4, tl.load(x + 1, mask=tl.load(x + 1), other=True))
    tl.store(out + 5, tl.max(tl.load(x + i).to(tl.int32), 0))


@gives(MEMORY, torch.tensor([1, 1 + 2**-10, 65504, math.inf], dtype=F16), torch.tensor([1, 1.001, 65519, 65520]))
@triton.jit
def stores_convert(out, x):
    tl.store(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)))


@gives(MEMORY, torch.arange(16.0), torch.arange(16.0))
@triton.jit
def policies(out, x):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i, cache_modifier=".cg"), cache_modifier=".wb")
    tl.store(out + 4 + i, tl.load(x + 4 + i, eviction_policy="evict_first"), eviction_policy="evict_last")
    tl.store(out + 8 + i, tl.load(x + 8 + i, cache_modifier=".ca"), cache_modifier=".cs")
    tl.store(out + 12 + i, tl.load(x + 12 + i, cache_modifier=".cv", volatile=True), cache_modifier=".wt")


PADDED = torch.arange(24.0).reshape(4, 6)
WINDOW = torch.full((8, 8), math.nan)
WINDOW[:2, :4] = PADDED[2:, 2:]


@gives(MEMORY, torch.stack([WINDOW, WINDOW.nan_to_num(0), WINDOW.nan_to_num(0).T]), PADDED, 4, 6)
@triton.jit
def block_pointers(out, x, rows, columns):
    source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (0, 2), (8, 8), (1, 0))
    source = tl.advance(source, (2, 0))
    target = tl.make_block_ptr(out, (24, 8), (8, 1), (0, 0), (8, 8), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="nan"))
    tl.store(tl.advance(target, (8, 0)), tl.load(source, boundary_check=(0, 1), padding_option="zero"))
    turned = tl.make_block_ptr(x, (columns, rows), (1, columns), (2, 2), (8, 8), (0, 1))
    tl.store(tl.advance(target, (16, 0)), tl.load(turned, boundary_check=(0, 1)), boundary_check=(0,))


TILED = torch.arange(5 * 12.0).reshape(5, 12)


@gives(MEMORY, 2 * TILED + 1, TILED, 5, 12, grid=(2, 3))
@triton.jit
def descriptors_in_the_kernel(out, x, rows, columns):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [4, 4])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [4, 4])
    tl.static_assert(source.block_shape[1] == 4)
    start = [tl.program_id(0) * 4, tl.program_id(1) * 4]
    target.store(start, 2 * source.load(start))
    tl.debug_barrier()
    target.atomic_add(start, tl.full((4, 4), 1.0, tl.float32))


@gives(MEMORY, torch.arange(64, dtype=I32), torch.arange(32, dtype=I32), torch.arange(32, 64, dtype=I32))
@triton.jit
def descriptors_of_one_and_three_dimensions(out, x, y):
    line = tl.make_tensor_descriptor(x, [32], [1], [16])
    for start in range(0, 32, 16):
        tl.store(out + start + tl.arange(0, 16), line.load([start]))
    cube = tl.make_tensor_descriptor(y, [2, 4, 4], [16, 4, 1], [1, 4, 4])
    for layer in range(2):
        tl.store(out + 32 + layer * 16 + tl.arange(0, 16), tl.ravel(cube.load([layer, 0, 0])))


EDGE = torch.full((4, 8), math.nan)
EDGE[:1, :4] = TILED[4:, 8:]


@gives(MEMORY, EDGE, TensorDescriptor(TILED, [5, 12], [12, 1], [4, 8], "nan"))
@triton.jit
def descriptors_of_the_host(out, x):
    tl.static_assert(x.dtype == tl.float32)
    tl.store(out + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :], x.load([4, 8]))


@named(MEMORY)
def test_memory(row, device):
    if device == "cuda":
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=I8, device=device))
    row.check(device)


@triton.jit
def swap_where_equal(memory, expected, before):
    i = tl.arange(0, 32)
    tl.store(before + i, tl.atomic_cas(memory + i, tl.load(expected + i), i + 100))


@triton.jit
def take_once(lock, winners):
    old = tl.atomic_cas(lock, 0, tl.program_id(0) + 1)
    tl.atomic_add(winners, (old == 0).to(tl.int32), sem="relaxed")


def test_compare_and_swap(device):
    memory, before = torch.arange(32, dtype=I32, device=device), torch.zeros(32, dtype=I32, device=device)
    expected = torch.where(torch.arange(32) % 2 == 0, torch.arange(32), 7).int().to(device)
    swap_where_equal[(1,)](memory, expected, before)
    assert before.tolist() == list(range(32))
    assert memory.tolist() == [i + 100 if i % 2 == 0 or i == 7 else i for i in range(32)]
    lock, winners = torch.zeros(1, dtype=I32, device=device), torch.zeros(1, dtype=I32, device=device)
    take_once[(64,)](lock, winners)
    assert winners.item() == 1
    assert 1 <= lock.item() <= 64


@triton.jit
def shuffle_rows(x, order, out, rows, columns):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [1, 16])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [1, 16])
    where = tl.load(order + tl.arange(0, 8))
    target.scatter(source.gather(where, 16), tl.arange(0, 8) + 1, 0)


def test_descriptors_gather_and_scatter():
    """Hopper has no instruction for them: interpreted only."""
    x, out = torch.arange(16.0 * 32).reshape(16, 32), torch.zeros(16, 32)
    order = torch.tensor([3, 1, 4, 15, 9, 2, 6, 16], dtype=I32)
    with tilewright.interpret():
        shuffle_rows[(1,)](x, order, out, 16, 32)
    expected = torch.zeros(16, 32)
    expected[1:8, :16] = x[order[:7].long(), 16:]  # row 16 is outside of x, and so zeros
    assert_near(out, expected)


# The language around them

FACTOR = tl.constexpr(3)


@triton.jit
def scaled(x, factor=FACTOR):
    return x * factor


@triton.jit
def both(x, y: tl.constexpr = 2):
    return x + y, x * y


@triton.jit
def constant():
    return 5


@gives(LANGUAGE, [10, 7, 4, 1, 0, 2, 4, 3, 3], 10, 2**40)
@triton.jit
def ranges(out, n, far):
    k = 0
    for i in range(n, 0, -3):
        tl.static_assert(i.dtype == tl.int32)
        tl.store(out + k, i)
        k += 1
    for i in tl.range(0, n // 2, 2, num_stages=2):
        tl.store(out + k, i)
        k += 1
    for i in range(far, far + 2):
        tl.static_assert(i.dtype == tl.int64)
        tl.store(out + k, 3)
        k += 1


@gives(LANGUAGE, [0, 10, 20, 7, 1, 5])
@triton.jit
def constants_of_the_compiler(out):
    for i in tl.static_range(3):
        tl.store(out + i, i * 10)
    SIZE: tl.constexpr = 2 * FACTOR + 1
    tl.static_assert(SIZE % 2 == 1)
    tl.store(out + 3, SIZE)
    block = tl.zeros((SIZE + 1, 4), tl.float16)
    HALF: tl.constexpr = block.dtype == tl.float16 and block.shape[0] == 8 and block.numel == 32
    if HALF:
        tl.store(out + 4, 1)
    tl.store(out + 5, max(FACTOR, 5) if block.type.is_block() else min(2, 3))


@gives(LANGUAGE, [6, 8, 4, 8, 5, 60], 2, (4, 60))
@triton.jit
def functions_and_tuples(out, x, pair):
    tl.store(out, scaled(x))
    tl.store(out + 1, scaled(x, factor=4))
    total, product = both(x)
    other = both(x, y=4)
    tl.store(out + 2, total * product // 4)
    tl.store(out + 3, other[1])
    five = constant()
    tl.static_assert(five.dtype == tl.int32)
    tl.store(out + 4, five)
    tl.store(out + 5, pair[1])


@gives(LANGUAGE, [111, 55, 9, 4, 1, 1])
@triton.jit
def loops_and_branches(out):
    x, steps = 27, 0
    while tl.condition(x != 1, disable_licm=True):
        if x % 2 == 0:
            x //= 2
        elif x > 0:
            x = 3 * x + 1
        steps += 1
    tl.store(out, steps)
    a, b = 0, 1
    for _ in range(10):
        a, b = b, a + b
    tl.store(out + 1, a)
    y = 3
    y *= y
    tl.store(out + 2, y)
    y -= 5
    tl.store(out + 3, y if y > 3 else -y)
    if (FACTOR and y > 3 and not y == 5) or y < 0:
        tl.store(out + 4, 1)
    tl.store(out + 5, 1 if tl.target_info.cuda_capability_geq(9, 0) else 0)


@gives(LANGUAGE, [0, 1, 3, 6, 0, 15, 21, 28], 4, grid=(8,))
@triton.jit
def programs_go_different_ways(out, skipped):
    pid = tl.program_id(0)
    if pid == skipped:
        return
    total = 0
    for i in range(pid):
        total += i + 1
    tl.store(out + pid, total)


@gives(
    LANGUAGE, [[[100 * x + 10 * y + z + 234000 for x in range(2)] for y in range(3)] for z in range(4)], grid=(2, 3, 4)
)
@triton.jit
def grid_of_three_dimensions(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(axis=2)
    sizes = tl.num_programs(0) * 100 + tl.num_programs(1) * 10 + tl.num_programs(2)
    tl.store(out + x + 2 * (y + 3 * z), x * 100 + y * 10 + z + sizes * 1000)


@gives(LANGUAGE, [0, 2, 4, 6], None, 4)
@triton.jit
def hints_and_assertions(out, nothing, n):
    i = tl.max_constancy(tl.multiple_of(tl.max_contiguous(tl.arange(0, 4), 4), 4), 1)
    tl.assume(n > 0)
    tl.device_assert(i < 0, "never looked at")
    assert n < 0, "nor this"
    tl.static_assert(nothing is None, "told")
    if nothing is not None:
        tl.store(out + i, nothing)
    tl.debug_barrier()
    tl.store(out + i, 2 * i, mask=i < n)


@gives(LANGUAGE, [12, 1], 6)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def heuristics(out, n, EVEN: tl.constexpr):
    tl.store(out, n * 2 if EVEN else n)
    tl.store(out + 1, EVEN.value)


@named(LANGUAGE)
def test_language(row, device):
    row.check(device)


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=1) for size in (16, 32)], key=["n"])
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def test_autotuned_kernels_take_their_first_configuration(device):
    x = torch.arange(100, device=device)
    out = torch.zeros_like(x)
    tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out=out, n=100)
    assert out.tolist() == x.tolist()
    with tilewright.interpret() as run:
        tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x.cpu(), out=torch.empty(100, dtype=I64), n=100)
    assert run.launches[0].meta["BLOCK"] == 16


@triton.jit
def show(x):
    tl.device_print("seen", tl.load(x + tl.program_id(0)))


def test_device_print(device, capfd):
    show[(2,)](torch.tensor([17, 42], device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    shown = capfd.readouterr().out
    assert re.search(r"^pid \(0, 0, 0\).* seen: 17$", shown, re.MULTILINE)
    assert re.search(r"^pid \(1, 0, 0\).* seen: 42$", shown, re.MULTILINE)


@triton.jit
def count_between(x, out):
    v = tl.load(x + tl.arange(0, 8))
    tl.store(out, tl.sum((2 < v <= 5).to(tl.int32)))


def test_chained_comparisons():
    """Triton refuses them; Python and so the interpreter do not."""
    out = torch.zeros(1, dtype=I32)
    with tilewright.interpret():
        count_between[(1,)](torch.arange(8), out)
    assert out.item() == 3


@triton.jit
def assembly(x):
    v = tl.load(x + tl.arange(0, 32))
    tl.store(x + tl.arange(0, 32), tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], tl.int32, True, 1))


@gluon.jit
def in_gluon(x):
    gluon.language.store(x, 1)


@triton.jit
def by_two(x, y):
    return x, y


@triton.jit
def packed(x):
    i = tl.arange(0, 32)
    tl.store(x + i, tl.map_elementwise(by_two, tl.load(x + i), pack=2))


@pytest.mark.parametrize(
    ("kernel", "construct"),
    [(assembly, "tl.inline_asm_elementwise"), (in_gluon, "Gluon"), (packed, "tl.map_elementwise with pack > 1")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_interpreted_says_so(kernel, construct):
    with tilewright.interpret(), pytest.raises(KernelStopped) as stopped:
        kernel[(1,)](torch.zeros(32, dtype=I32))
    assert stopped.value.kind == "unsupported"
    assert re.fullmatch(rf"\S*test_operations.py:\d+: {kernel.fn.__name__} uses {construct}, .*", str(stopped.value))
