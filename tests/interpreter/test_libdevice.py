"""libdevice functions, compared with exact arithmetic, Python's math module and known values."""

import ast
import itertools
import math
import struct
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from triton.language import core
from triton.language.extra.cuda import libdevice as triton_libdevice

from tilewright.interpreter import libdevice

INF, NAN = math.inf, math.nan
NUMPY = {
    "int32": np.int32,
    "uint32": np.int32,
    "int64": np.int64,
    "uint64": np.int64,
    "fp32": np.float32,
    "fp64": np.float64,
}
SAMPLES = {
    np.int32: [0, 1, -1, 3, 100, 2**31 - 1, -(2**31)],
    np.int64: [0, 1, -1, 3, 100, 2**63 - 1, -(2**63)],
    np.float32: [0.0, -0.0, 1.5, -INF, NAN, 1e-45, 3e38],
    np.float64: [0.0, -0.0, 1.5, -INF, NAN, 5e-324, 1e308],
}
MODES = ("rn", "rz", "rd", "ru")
WIDTHS = {np.float32: ("f", "float", np.int32), np.float64: ("d", "double", np.int64)}


def declared():
    """Yield (symbol, operand types, result type) of every function that Triton declares."""
    tables = [
        node for node in ast.walk(ast.parse(Path(triton_libdevice.__file__).read_text())) if type(node) is ast.Dict
    ]
    for table in tables:
        for operands, (symbol, result) in eval(ast.unparse(table), {"core": core}).items():
            yield symbol, tuple(NUMPY[each.name] for each in operands), NUMPY[result.name]


DECLARED = list(declared())


def call(name, *args):
    return libdevice.evaluate("__nv_" + name, list(args))


def same(got, expected):
    """Return whether the results are bit-identical, except for the payload of NaN."""
    expected = np.asarray(expected, got.dtype)
    return got.shape == expected.shape and bool(
        np.all((got == expected) & (np.signbit(got) == np.signbit(expected)) | np.isnan(got) & np.isnan(expected))
    )


def test_triton_declares_the_expected_functions():
    assert len(DECLARED) > 250
    assert ("__nv_tanhf", (np.float32,), np.float32) in DECLARED
    assert ("__nv_umulhi", (np.int32, np.int32), np.int32) in DECLARED


@pytest.mark.parametrize(("symbol", "operands", "result"), DECLARED, ids=[symbol for symbol, *_ in DECLARED])
def test_every_declared_function_exists_and_returns_its_declared_type(symbol, operands, result):
    counts = [0, 1, 2, 5, -1, 3, 4]  # small orders, since Bessel functions recur over them
    args = [
        np.array(counts if symbol[5:7] in ("jn", "yn") and each is np.int32 else SAMPLES[each], each)
        for each in operands
    ]
    value = libdevice.evaluate(symbol, args)
    assert value.dtype == result
    assert value.shape == (7,)
    assert libdevice.evaluate(symbol, [arg[:0] for arg in args]).shape == (0,)


def test_operands_broadcast_and_are_not_modified():
    column, row = np.array([[1.0], [2.0]], np.float32), np.array([3.0, 4.0, 5.0], np.float32)
    assert same(call("fadd_rn", column, row), [[4, 5, 6], [5, 6, 7]])
    assert same(call("fabsf", np.array(-2.0, np.float32)), 2.0)
    assert column.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("symbol", ["__nv_nothing", "tanhf", "__nv_", "__tanhf"])
def test_an_unknown_symbol_is_a_key_error(symbol):
    with pytest.raises(KeyError, match=symbol):
        libdevice.evaluate(symbol, [np.zeros(1, np.float32)])


# Rounding


def rounded(exact, mode, dtype):
    """Return the float that an exact number rounds to, found among its two neighbours."""
    limit = Fraction(float(np.finfo(dtype).max))
    if abs(exact) > limit:
        half_step = (limit - Fraction(float(np.nextafter(dtype(limit), dtype(0))))) / 2
        grows = {"rn": abs(exact) >= limit + half_step, "rz": False, "rd": exact < 0, "ru": exact > 0}[mode]
        return dtype((INF if grows else float(limit)) * (1 if exact > 0 else -1))
    lower = upper = dtype(float(exact))
    while Fraction(float(lower)) > exact:
        lower = np.nextafter(lower, dtype(-INF))
    while Fraction(float(upper)) < exact:
        upper = np.nextafter(upper, dtype(INF))
    above, below = Fraction(float(upper)) - exact, exact - Fraction(float(lower))
    even = lower if lower.view(WIDTHS[dtype][2]) % 2 == 0 else upper
    nearest = even if above == below else upper if above < below else lower
    return {"rn": nearest, "rz": lower if exact > 0 else upper, "rd": lower, "ru": upper}[mode]


def root(x):
    """Return a square root to a thousand bits, the last of which is sticky."""
    scaled = x * 2**2100
    floor = math.isqrt(int(scaled))
    return Fraction(2 * floor + (floor * floor != scaled), 2**1051)


def edges(dtype):
    info = np.finfo(dtype)
    tiny, sub, big, eps = info.tiny, info.smallest_subnormal, info.max, info.eps
    drawn = np.random.default_rng(0).standard_normal(6) * [1, 1e3, 1e-3, 1e-30, 1e30, 7]
    values = [1, 1 + eps, 1 - eps / 2, 3, 1 / 3, eps / 2, eps / 4, tiny, sub, tiny - sub, 3 * sub, big, big / 3, *drawn]
    return np.array([*values, *(-each for each in values[:12])], dtype)


EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": root,
}


def agree(got, exact, mode, dtype):
    expected = np.array([rounded(each, mode, dtype) if each else 0 for each in exact], dtype)
    np.testing.assert_array_equal(got, expected)  # ignores the sign of zero
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("operation", EXACT)
def test_arithmetic_uses_the_rounding_mode_in_its_name(operation, dtype):
    values = edges(dtype)
    if operation == "sqrt":
        values = np.abs(values)
    arity = 1 if operation in ("rcp", "sqrt") else 2
    operands = [np.array(each) for each in zip(*itertools.product(values, repeat=arity), strict=True)]
    exact = [EXACT[operation](*map(Fraction, each)) for each in zip(*(arg.tolist() for arg in operands), strict=True)]
    for mode in MODES:
        agree(call(f"{WIDTHS[dtype][0]}{operation}_{mode}", *operands), exact, mode, dtype)


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "fmaf"), (np.float64, "fma")])
def test_fma_rounds_once(dtype, name):
    generator = np.random.default_rng(1)
    a, b, c = generator.choice(edges(dtype), (3, 300))
    with np.errstate(all="ignore"):
        close = np.where(np.arange(300) % 2, -(a * b), a * b * generator.choice([2**-24, 2**-53, 2**60], 300)).astype(
            dtype
        )
    for third in (c, np.where(np.isfinite(close), close, c)):
        exact = [
            Fraction(x) * Fraction(y) + Fraction(z)
            for x, y, z in zip(*map(np.ndarray.tolist, (a, b, third)), strict=True)
        ]
        for mode in MODES:
            agree(call(f"{name}_{mode}", a, b, third), exact, mode, dtype)
        assert same(call(name, a, b, third), call(f"{name}_rn", a, b, third))


def test_fp32_fma_is_not_rounded_in_fp64_first():
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    c = np.float32(2**-80)  # a * b is halfway between two floats
    assert call("fmaf", a, b, c) > call("fmaf", a, b, -c)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_cancellation_gives_negative_zero_only_when_rounding_down(dtype):
    letter, fma = WIDTHS[dtype][0], "fmaf" if dtype is np.float32 else "fma"
    one, zero = dtype(1), dtype(0)
    for mode in MODES:
        for value in (
            call(f"{letter}add_{mode}", one, -one),
            call(f"{letter}sub_{mode}", one, one),
            call(f"{letter}add_{mode}", zero, -zero),
            call(f"{fma}_{mode}", one, one, -one),
        ):
            assert same(value, -zero if mode == "rd" else zero)
        assert same(call(f"{letter}add_{mode}", zero, zero), zero)
        assert same(call(f"{letter}mul_{mode}", zero, -one), -zero)
        assert same(call(f"{letter}add_{mode}", -zero, -zero), -zero)
        assert same(call(f"{letter}sqrt_{mode}", -zero), -zero)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("mode", MODES)
def test_infinities_and_nans_in_every_mode(dtype, mode):
    letter, fma = WIDTHS[dtype][0], "fmaf" if dtype is np.float32 else "fma"
    a, b = (
        np.array(each, dtype) for each in zip((INF, 1), (INF, -INF), (1, 0), (-1, 0), (0, 0), (NAN, 1), strict=True)
    )
    assert same(call(f"{letter}add_{mode}", a, b)[:2], [INF, NAN])
    assert same(call(f"{letter}mul_{mode}", a, b)[:2], [INF, -INF])
    assert same(call(f"{letter}div_{mode}", a, b), [INF, NAN, INF, -INF, NAN, NAN])
    assert same(call(f"{letter}rcp_{mode}", np.array([INF, -INF, 0, -0.0, NAN], dtype)), [0, -0.0, INF, -INF, NAN])
    assert same(call(f"{letter}sqrt_{mode}", np.array([INF, -1, NAN], dtype)), [INF, NAN, NAN])
    assert same(call(f"{fma}_{mode}", a[:3], b[:3], np.array([-INF, 1, 2], dtype)), [NAN, -INF, 2])


# Conversions

INTEGERS = {"int": (32, True), "uint": (32, False), "ll": (64, True), "ull": (64, False)}
TO_WHOLE = {"rn": round, "rz": math.trunc, "rd": math.floor, "ru": math.ceil}


def as_signed(value, bits):
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("target", INTEGERS)
def test_float_to_integer_conversion_clamps(dtype, target):
    bits, signed = INTEGERS[target]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    powers = [2.0**e + d for e in (0, 1, 23, 31, 32, 52, 63, 64, 100) for d in (0, -0.5, 0.5, 1.5)]
    values = np.array([0, 0.3, 0.5, 0.7, 1.5, 2.5, *powers], dtype)
    values = np.concatenate([values, -values])
    for mode, whole in TO_WHOLE.items():
        expected = [as_signed(min(max(whole(Fraction(each)), low), high), bits) for each in values.tolist()]
        name = f"{WIDTHS[dtype][1]}2{target}_{mode}"
        assert call(name, values).tolist() == expected
        assert call(name, np.array([INF, -INF], dtype)).tolist() == [as_signed(high, bits), low]
        nan = 0 if dtype is np.float32 and bits == 32 else -(2 ** (bits - 1))  # as specified for cvt in PTX
        assert call(name, np.array(NAN, dtype)).item() == nan


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_integer_to_float_conversion_uses_the_rounding_mode_in_its_name(source, dtype):
    bits, signed = INTEGERS[source]
    wanted = [2**e + d for e in range(0, bits, 3) for d in (-3, -1, 0, 1, 7)]
    wanted += [2**62 + 2**38 + d for d in (-1, 0, 1)] + [2**62 + 2**9 + d for d in (-1, 0, 1)]  # ties in fp32 and fp64
    patterns = np.array([as_signed(sign * each, bits) for each in wanted for sign in (1, -1)], f"i{bits // 8}")
    exact = [Fraction(each if signed else each % 2**bits) for each in patterns.tolist()]
    for mode in MODES if bits == 64 or dtype is np.float32 else ("rn",):
        got = call(f"{source}2{WIDTHS[dtype][1]}_{mode}", patterns)
        agree(got, exact, mode, dtype)
        assert not np.any(np.signbit(got) & (got == 0))


@pytest.mark.parametrize("mode", MODES)
def test_double_to_float_conversion(mode):
    values = np.concatenate([edges(np.float64), edges(np.float32), [1 + 2**-24, 1 + 3 * 2**-24, 3.4028235677973366e38]])
    agree(call(f"double2float_{mode}", values), [Fraction(each) for each in values.tolist()], mode, np.float32)
    assert same(call(f"double2float_{mode}", np.array([0, -0.0, INF, -INF, NAN])), [0, -0.0, INF, -INF, NAN])


def test_half_conversion():
    values = np.array([1.5, -0.0, 65520, 1e-8, 2**-24], np.float32)
    bits = call("float2half_rn", values)
    assert bits.dtype == np.int16
    assert same(call("half2float", bits), [1.5, -0.0, INF, 0, 2**-24])


def test_bitcasts():
    float_bits, double_bits = (
        struct.unpack("<i", struct.pack("<f", -1.1))[0],
        struct.unpack("<q", struct.pack("<d", -1.1))[0],
    )
    single, double = np.float32(-1.1), np.float64(-1.1)
    for sign in ("", "u"):
        assert call(f"float_as_{sign}int", single) == float_bits
        assert call(f"{sign}int_as_float", np.int32(float_bits)) == single
    assert call("double_as_longlong", double) == double_bits
    assert call("longlong_as_double", np.int64(double_bits)) == double
    high, low = call("double2hiint", double), call("double2loint", double)
    assert (high.item(), low.item()) == (double_bits >> 32, as_signed(double_bits, 32))
    assert call("hiloint2double", high, low) == double


# Integers


def reversed_bits(x, bits):
    return int(f"{x % 2**bits:0{bits}b}"[::-1], 2)


def patterns(bits):
    drawn = np.random.default_rng(2).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), 8, f"i{bits // 8}")
    edge = [0, 1, -1, 2, 2**24, -(2**23), 2 ** (bits - 1) - 1, -(2 ** (bits - 1))]
    return np.array([*edge, *drawn.tolist()], drawn.dtype)


# (bits, signed, exact function); results are taken modulo 2**bits.
PAIRS = {
    "hadd": (32, True, lambda a, b: (a + b) >> 1),
    "rhadd": (32, True, lambda a, b: (a + b + 1) >> 1),
    "mul24": (32, True, lambda a, b: as_signed(a, 24) * as_signed(b, 24)),
    "mulhi": (32, True, lambda a, b: a * b >> 32),
    "mul64hi": (64, True, lambda a, b: a * b >> 64),
    "min": (32, True, min),
    "max": (32, True, max),
    "llmin": (64, True, min),
    "llmax": (64, True, max),
    "uhadd": (32, False, lambda a, b: (a + b) >> 1),
    "urhadd": (32, False, lambda a, b: (a + b + 1) >> 1),
    "umul24": (32, False, lambda a, b: a % 2**24 * (b % 2**24)),
    "umulhi": (32, False, lambda a, b: a * b >> 32),
    "umul64hi": (64, False, lambda a, b: a * b >> 64),
    "umin": (32, False, min),
    "umax": (32, False, max),
    "ullmin": (64, False, min),
    "ullmax": (64, False, max),
}


@pytest.mark.parametrize("name", PAIRS)
def test_integer_arithmetic(name):
    bits, signed, exact = PAIRS[name]
    pairs = list(itertools.product(patterns(bits).tolist(), repeat=2))
    a, b = np.array(pairs, patterns(bits).dtype).T
    expected = [as_signed(exact(*(each if signed else each % 2**bits for each in pair)), bits) for pair in pairs]
    assert call(name, a, b).tolist() == expected


def test_sums_of_absolute_differences_wrap_around():
    top, bottom = 2**31 - 1, -(2**31)
    assert call("sad", np.int32(top), np.int32(bottom), np.int32(5)) == 4
    assert call("sad", np.int32(-3), np.int32(4), np.int32(1)) == 8
    assert call("usad", np.int32(-3), np.int32(4), np.int32(1)) == -6


BITS = {
    "popc": lambda x, bits: bin(x % 2**bits).count("1"),
    "clz": lambda x, bits: bits - (x % 2**bits).bit_length(),
    "ffs": lambda x, bits: (x & -x).bit_length(),
    "brev": lambda x, bits: as_signed(reversed_bits(x, bits), bits),
}


@pytest.mark.parametrize(("bits", "suffix", "absolute"), [(32, "", "abs"), (64, "ll", "llabs")])
def test_bit_counting_and_reversal(bits, suffix, absolute):
    values = patterns(bits)
    for name, exact in BITS.items():
        assert call(name + suffix, values).tolist() == [exact(each, bits) for each in values.tolist()]
    assert call(absolute, values).tolist() == [as_signed(abs(each), bits) for each in values.tolist()]


def test_byte_perm():
    a, b = np.int32(0x33221100), np.int32(0x77665544)
    selectors = {0x3210: 0x33221100, 0x7654: 0x77665544, 0x0246: 0x00224466, 0x8888: 0, 0x5A7135: 0x77113355}
    for selector, expected in selectors.items():
        assert call("byte_perm", a, b, np.int32(selector)) == expected


# Functions of floats


def mean(function, points=400):
    """Return the mean over one period by the trapezoidal rule, which converges exponentially for these functions."""
    return math.fsum(function(2 * math.pi * k / points) for k in range(points)) / points


def signed_power(x, exponent):
    return math.copysign(abs(x) ** exponent, x)


SIGNED = [0.001, -0.02, 0.3, -0.77, 1.0, -1.9, 2.5, -4.25, 7.7, -11.0]
POSITIVE = [1e-30, 1e-3, 0.4, 0.99, 1.0, 1.5, 3.7, 20.0, 1e5, 1e30]
WITHIN_ONE = [0.001, -0.02, 0.3, -0.5, 0.77, -0.9, 0.999]
NORMAL = NormalDist()
UNARY = {
    "acos": (math.acos, WITHIN_ONE),
    "acosh": (math.acosh, [1.0, 1.5, 3.7, 20.0, 1e5]),
    "asin": (math.asin, WITHIN_ONE),
    "asinh": (math.asinh, SIGNED),
    "atan": (math.atan, SIGNED),
    "atanh": (math.atanh, WITHIN_ONE),
    "cbrt": (lambda x: signed_power(x, 1 / 3), SIGNED),
    "ceil": (math.ceil, SIGNED),
    "cos": (math.cos, [*SIGNED, 1e5]),
    "cosh": (math.cosh, SIGNED),
    "cospi": (lambda x: math.cos(math.pi * x), [0.001, -0.02, 0.3, -0.77, 1.9]),
    "cyl_bessel_i0": (lambda x: mean(lambda t: math.exp(x * math.cos(t))), SIGNED),
    "cyl_bessel_i1": (lambda x: mean(lambda t: math.exp(x * math.cos(t)) * math.cos(t)), SIGNED[2:]),
    "erf": (math.erf, SIGNED),
    "erfc": (math.erfc, SIGNED),
    "erfcinv": (lambda x: -NORMAL.inv_cdf(x / 2) / math.sqrt(2), [1e-30, 0.1, 0.8, 1.3, 1.9]),
    "erfcx": (lambda x: math.erfc(x) * math.exp(x * x), SIGNED),
    "erfinv": (lambda x: NORMAL.inv_cdf((1 + x) / 2) / math.sqrt(2), [-0.9, 0.3, 0.5, 0.77]),
    "exp": (math.exp, SIGNED),
    "exp10": (lambda x: 10.0**x, SIGNED),
    "exp2": (lambda x: 2.0**x, SIGNED),
    "expm1": (math.expm1, SIGNED),
    "fabs": (abs, SIGNED),
    "floor": (math.floor, SIGNED),
    "j0": (lambda x: mean(lambda t: math.cos(x * math.sin(t))), [*SIGNED, 24.9, 25.1, 90.0]),
    "j1": (lambda x: mean(lambda t: math.cos(t - x * math.sin(t))), [*SIGNED[2:], 24.9, 25.1, 90.0]),
    "lgamma": (math.lgamma, [1e-30, 0.4, 1.5, 3.7, 20.0, 1e5, -0.77, -4.25]),
    "log": (math.log, POSITIVE),
    "log10": (math.log10, POSITIVE),
    "log1p": (math.log1p, POSITIVE),
    "log2": (math.log2, POSITIVE),
    "logb": (lambda x: math.frexp(x)[1] - 1, SIGNED),
    "normcdf": (lambda x: math.erfc(-x / math.sqrt(2)) / 2, SIGNED),
    "normcdfinv": (NORMAL.inv_cdf, [1e-30, 0.001, 0.3, 0.77, 0.999]),
    "rcbrt": (lambda x: signed_power(x, -1 / 3), SIGNED),
    "rsqrt": (lambda x: 1 / math.sqrt(x), POSITIVE),
    "sin": (math.sin, [*SIGNED, 1e5]),
    "sinh": (math.sinh, SIGNED),
    "sinpi": (lambda x: math.sin(math.pi * x), [0.001, -0.02, 0.3, -0.77, 1.9]),
    "sqrt": (math.sqrt, POSITIVE),
    "tan": (math.tan, [*SIGNED, 1e5]),
    "tanh": (math.tanh, SIGNED),
    "tgamma": (math.gamma, [1e-30, 0.4, 1.5, 3.7, 20.0, -0.77, -4.25]),
    "trunc": (math.trunc, SIGNED),
}
MORE = {
    "atan2": (math.atan2, [(1.0, -2.0), (-0.3, 0.7), (3.0, 1e-20)]),
    "copysign": (math.copysign, [(1.5, -0.0), (-2.0, 3.0)]),
    "fdim": (lambda x, y: max(x - y, 0), [(3.0, 1.5), (1.5, 3.0), (2.0, -1.0)]),
    "fmax": (max, [(3.0, 1.5), (-1.5, 3.0)]),
    "fmin": (min, [(3.0, 1.5), (-1.5, 3.0)]),
    "fmod": (math.fmod, [(5.5, 2.0), (-5.5, 2.0), (1e30, 0.7), (3.0, -1e-30)]),
    "hypot": (math.hypot, [(3.0, 4.0), (1e30, 1e30), (1e-30, 2e-30)]),
    "norm3d": (math.hypot, [(1.0, 2.0, -2.0), (1e30, 1e30, 1.0)]),
    "norm4d": (math.hypot, [(1.0, 2.0, -3.0, 4.0), (1e-30, 1e-30, 3e-30, 0.0)]),
    "pow": (math.pow, [(2.5, 3.5), (-2.0, 3.0), (1e-3, -7.0), (-8.0, -3.0)]),
    "remainder": (math.remainder, [(5.5, 2.0), (-5.0, 2.0), (3.0, 2.0), (1.0, 2.0), (1e30, 0.7), (7.0, -4.0)]),
    "rhypot": (lambda *x: 1 / math.hypot(*x), [(3.0, 4.0), (1e30, 1e30)]),
    "rnorm3d": (lambda *x: 1 / math.hypot(*x), [(1.0, 2.0, -2.0), (1e30, 1e30, 1.0)]),
    "rnorm4d": (lambda *x: 1 / math.hypot(*x), [(1.0, 2.0, -3.0, 4.0)]),
}
FAST = ("sin", "cos", "tan", "exp", "exp10", "log", "log2", "log10")


def close(name, dtype, expected, args):
    got = call(name, *(np.array(arg, dtype) for arg in zip(*args, strict=True)))
    values = [expected(*map(float, np.array(each, dtype))) for each in args]
    if dtype is np.float32:  # computed in fp64, so at most one ulp off, next to a tie
        np.testing.assert_array_max_ulp(got, np.array(values, np.float32), 1)
    else:
        np.testing.assert_allclose(got, values, rtol=5e-14)


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_match_python(name):
    expected, inputs = UNARY[name]
    args = [(each,) for each in inputs]
    close(name, np.float64, expected, args)
    close(name + "f", np.float32, expected, args)
    if name in FAST:
        close(f"fast_{name}f", np.float32, expected, args)


@pytest.mark.parametrize("name", MORE)
def test_functions_of_several_operands_match_python(name):
    close(name, np.float64, *MORE[name])
    close(name + "f", np.float32, *MORE[name])


@pytest.mark.parametrize(("dtype", "suffix"), [(np.float32, "f"), (np.float64, "")])
def test_bessel_functions_of_any_order(dtype, suffix):
    orders, x = np.arange(0, 140, 7, np.int32)[:, None], np.array([0.5, 2.0, 9.0, 24.0, 31.0, 120.0], dtype)
    j, j_next = (call("jn" + suffix, n, x).astype(np.float64) for n in (orders, orders + 1))
    y, y_next = (call("yn" + suffix, n, x).astype(np.float64) for n in (orders, orders + 1))
    expected = [[mean(lambda t, n=n, v=v: math.cos(n * t - v * math.sin(t))) for v in x.tolist()] for n in orders[:, 0]]
    np.testing.assert_allclose(j, expected, rtol=0, atol=1e-7 if suffix else 1e-14)
    usual = (np.abs(y_next) < 1e30) & (np.abs(j_next) > 1e-30)
    wronskian = (j_next * y - j * y_next) * np.pi * x / 2
    np.testing.assert_allclose(wronskian[usual], 1, rtol=3e-6 if suffix else 1e-13)
    for name in ("j0", "j1", "y0", "y1"):
        assert same(call(name + suffix, x), call(f"{name[0]}n{suffix}", np.int32(int(name[1])), x))


def test_the_far_tail_of_the_normal_distribution():
    np.testing.assert_allclose(
        call("normcdf", np.array([-30.0, -37.0])), [4.906713927148187e-198, 5.725571222524577e-300], rtol=2e-15
    )


def test_bessel_functions_of_the_second_kind_at_known_points():
    x = np.array([1e-5, 1.0, 10.0, 30.0])
    known = {
        "y0": [-7.40316028370197, 0.08825696421567696, 0.055671167283599395, -0.11729573168666403],
        "y1": [-63661.97727536548, -0.7812128213002887, 0.24901542420695388, 0.08442557066174723],
    }
    for name, expected in known.items():
        np.testing.assert_allclose(call(name, x), expected, rtol=1e-14)
        np.testing.assert_array_max_ulp(
            call(name + "f", x[1:].astype(np.float32)), np.array(expected[1:], np.float32), 1
        )


def test_rounding_to_integers_keeps_the_sign_of_zero():
    values = np.array([0.5, 1.5, 2.5, -0.5, -2.5, -0.3, 0.49999999999999994, 2.0**52 + 1, -0.0, INF, NAN])
    even = [0, 2, 2, -0.0, -2, -0.0, 0, 2.0**52 + 1, -0.0, INF, NAN]
    away = [1, 2, 3, -1, -3, -0.0, 0, 2.0**52 + 1, -0.0, INF, NAN]
    for name, expected in (("rint", even), ("nearbyint", even), ("round", away)):
        assert same(call(name, values), expected)
        assert same(call(name + "f", values[:6].astype(np.float32)), expected[:6])
    lowest, highest = -(2**63), 2**63 - 1
    for name, expected in (("llrint", even), ("llround", away)):
        assert call(name, values).tolist() == [*map(int, expected[:9]), highest, lowest]
        assert call(name + "f", np.array([2.5, -2.5, -1e30, NAN], np.float32)).tolist() == [
            int(expected[2]),
            int(expected[4]),
            lowest,
            lowest,
        ]


def test_ldexp_rounds_once():
    x = np.array([1.5, -0.75, 1 + 2**-23, 1, 0, -INF], np.float32)
    powers = np.array([-149, 3, -149, 2**31 - 1, 7, -5], np.int32)
    for name in ("ldexp", "scalbn"):
        assert same(call(name + "f", x, powers), [2**-148, -6, 2**-149, INF, 0, -INF])
        assert same(call(name, np.array([3.0, 1.0]), np.array([-1075, 1023], np.int32)), [1e-323, 2.0**1023])


def test_powers_with_integer_exponents():
    assert same(
        call("powi", np.array([-2.0, 10.0, 0.0, -1.0]), np.array([3, -2, 0, -(2**31)], np.int32)), [-8, 0.01, 1, 1]
    )
    assert same(call("powif", np.array([-2.0, 3.0], np.float32), np.array([-1, 4], np.int32)), [-0.5, 81])


def test_nextafter():
    for dtype, name in ((np.float32, "nextafterf"), (np.float64, "nextafter")):
        tiny = np.finfo(dtype).smallest_subnormal
        assert same(call(name, np.array([0, 1], dtype), np.array([-1, 2], dtype)), [-tiny, 1 + np.finfo(dtype).eps])


SPECIAL = [0.0, -0.0, INF, -INF, NAN]
AT_SPECIAL = {  # results for the values in SPECIAL
    "exp": [1, 1, INF, 0, NAN],
    "exp10": [1, 1, INF, 0, NAN],
    "expm1": [0, -0.0, INF, -1, NAN],
    "log": [-INF, -INF, INF, NAN, NAN],
    "log1p": [0, -0.0, INF, NAN, NAN],
    "sin": [0, -0.0, NAN, NAN, NAN],
    "sinpi": [0, -0.0, NAN, NAN, NAN],
    "cospi": [1, 1, NAN, NAN, NAN],
    "tanh": [0, -0.0, 1, -1, NAN],
    "sqrt": [0, -0.0, INF, NAN, NAN],
    "rsqrt": [INF, -INF, 0, NAN, NAN],
    "cbrt": [0, -0.0, INF, -INF, NAN],
    "rcbrt": [INF, -INF, 0, -0.0, NAN],
    "logb": [-INF, -INF, INF, INF, NAN],
    "lgamma": [INF, INF, INF, INF, NAN],
    "tgamma": [INF, -INF, INF, NAN, NAN],
    "erf": [0, -0.0, 1, -1, NAN],
    "erfc": [1, 1, 0, 2, NAN],
    "erfcx": [1, 1, 0, INF, NAN],
    "erfinv": [0, -0.0, NAN, NAN, NAN],
    "erfcinv": [INF, INF, NAN, NAN, NAN],
    "normcdf": [0.5, 0.5, 1, 0, NAN],
    "normcdfinv": [-INF, -INF, NAN, NAN, NAN],
    "j0": [1, 1, 0, 0, NAN],
    "j1": [0, -0.0, 0, -0.0, NAN],
    "y0": [-INF, -INF, 0, NAN, NAN],
    "y1": [-INF, -INF, 0, NAN, NAN],
    "cyl_bessel_i0": [1, 1, INF, INF, NAN],
    "cyl_bessel_i1": [0, -0.0, INF, -INF, NAN],
    "ilogb": [-(2**31), -(2**31), 2**31 - 1, 2**31 - 1, -(2**31)],
}


@pytest.mark.parametrize("name", AT_SPECIAL)
def test_special_values(name):
    assert same(call(name, np.array(SPECIAL)), AT_SPECIAL[name])
    assert same(call(name + "f", np.array(SPECIAL, np.float32)), AT_SPECIAL[name])


KNOWN = [  # name, operands, result
    ("acoshf", [0.5], NAN),
    ("atanhf", [1.0], INF),
    ("erfinv", [1.0], INF),
    ("erfcinv", [1.0], 0.0),
    ("erfcinv", [2.0], -INF),
    ("normcdfinv", [0.5], 0.0),
    ("tgamma", [-3.0], NAN),
    ("tgamma", [200.0], INF),
    ("lgammaf", [2.0], 0.0),
    ("sinpi", [-3.0], -0.0),
    ("sinpif", [1e10], 0.0),
    ("cospif", [0.5], 0.0),
    ("cospi", [1e300], 1.0),
    ("pow", [-1.0, INF], 1.0),
    ("pow", [1.0, NAN], 1.0),
    ("powf", [-2.0, 0.5], NAN),
    ("fast_powf", [-2.0, 2.0], NAN),  # it is exp2(y * log2(x))
    ("fast_powf", [2.0, 10.0], 1024.0),
    ("fast_fdividef", [3.0, 2.0], 1.5),
    ("fast_fdividef", [3.0, 1e38], 0.0),  # documented to return zero
    ("fast_fdividef", [INF, 1e38], NAN),
    ("saturatef", [0.25], 0.25),
    ("saturatef", [7.0], 1.0),
    ("saturatef", [-7.0], 0.0),
    ("saturatef", [NAN], 0.0),
    ("fmod", [INF, 1.0], NAN),
    ("fmod", [-6.0, 3.0], -0.0),
    ("fmodf", [1.0, INF], 1.0),
    ("remainder", [1.0, 0.0], NAN),
    ("remainder", [1e308, INF], 1e308),
    ("remainder", [1.7e308, 1e308], math.remainder(1.7e308, 1e308)),
    ("remainderf", [-6.0, 3.0], -0.0),
    ("remainder", [1.5e-323, 1e-323], -5e-324),
    ("fdimf", [INF, INF], 0.0),
    ("fdim", [NAN, 1.0], NAN),
    ("fmaxf", [NAN, 1.0], 1.0),
    ("hypot", [INF, NAN], INF),
    ("hypot", [3e-324, 0.0], 5e-324),
    ("norm3d", [1e308, 0.0, 0.0], 1e308),
    ("rnorm3d", [-INF, NAN, 1.0], 0.0),
    ("rnorm4d", [0.0, 0.0, 0.0, 0.0], INF),
    ("rhypot", [1.7e308, 0.0], 1 / 1.7e308),
    ("atan2f", [0.0, -0.0], np.float32(math.pi)),
    ("frsqrt_rn", [4.0], 0.5),
    ("expf", [-100.0], np.float32(math.exp(-100))),  # subnormal
    ("exp2f", [-149.0], 1e-45),
    ("logf", [1e-45], np.float32(-149 * math.log(2))),
    ("ilogbf", [1e-45], -149),
    ("ilogb", [5e-324], -1074),
    ("rcp64h", [4.0], 0.25),
    ("rcp64h", [5e-324], INF),
    ("rcp64h", [1e308], 0.0),
    ("isnanf", [NAN], 1),
    ("isnand", [INF], 0),
    ("isinff", [-INF], 1),
    ("isinfd", [NAN], 0),
    ("finitef", [1e30], 1),
    ("finitef", [INF], 0),
    ("isfinited", [NAN], 0),
    ("signbitf", [-0.0], 1),
    ("signbitd", [1.0], 0),
]
SINGLE = {symbol[5:] for symbol, operands, _ in DECLARED if operands[0] is np.float32} | {"fmaxf"}


@pytest.mark.parametrize(("name", "operands", "expected"), KNOWN)
def test_known_values(name, operands, expected):
    value = call(name, *(np.array(each, np.float32 if name in SINGLE else np.float64) for each in operands))
    assert same(value, expected)


def test_rcp64h_clears_the_low_word():
    x = np.array([3.0, -0.7, 1e10])
    value = call("rcp64h", x)
    np.testing.assert_allclose(value, 1 / x, rtol=2e-6)
    assert not np.any(call("double2loint", value))
