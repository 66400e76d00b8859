"""`score_mod` and `mask_mod`: small functions of a score and its place, compiled into the kernel.

A Python function is called once with symbols, as FlexAttention calls it with tensors. The expression that it returns is
written as a Triton function, and differentiated with respect to the score. A `@triton.jit` function is used as it is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from tilewright.runtime.operator import constant_when_compiled

PLACES = ("b", "h", "q_idx", "kv_idx")
SCORE = ("score", *PLACES)


@triton.jit
def floor_divide(x, y):
    """x // y as Python and torch round it; Triton rounds towards zero."""
    remainder = x % y
    return x // y - ((remainder != 0) & ((remainder < 0) != (y < 0))).to(tl.int32)


@triton.jit
def modulo(x, y):
    """x % y with the sign of y, as in Python and torch."""
    remainder = x % y
    return tl.where((remainder != 0) & ((remainder < 0) != (y < 0)), remainder + y, remainder)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def tanh(x):
    """tanh from one exponential, and from its series where the difference would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    return tl.where(tl.abs(x) < 0.1, series, sign(x) * (1.0 - t) / (1.0 + t))


class Symbol:
    """An expression: an operation on expressions and numbers, or an argument of the function."""

    def __init__(self, operation: str, *operands: Any):
        self.operation, self.operands = operation, operands

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Symbol:
        name = function.__name__
        if name not in OPERATIONS or kwargs:
            raise TypeError(f"a mod cannot use torch's {name} like this. It can use {', '.join(OPERATIONS)}.")
        return symbol(name, *args)

    def __bool__(self) -> bool:
        raise TypeError("a mod cannot branch on its arguments. Use torch.where, and & instead of `and`.")


# How each operation is written in Triton, and its derivatives with respect to its operands, if it has any.
OPERATIONS: dict[str, tuple[str, Callable[..., tuple[Any, ...]] | None]] = {
    "add": ("{} + {}", lambda x, y: (1.0, 1.0)),
    "sub": ("{} - {}", lambda x, y: (1.0, -1.0)),
    "mul": ("{} * {}", lambda x, y: (y, x)),
    "div": ("{} / {}", lambda x, y: (1.0 / y, -x / (y * y))),
    "floor_divide": ("floor_divide({}, {})", None),
    "remainder": ("modulo({}, {})", None),
    "neg": ("-{}", lambda x: (-1.0,)),
    "abs": ("tl.abs({})", lambda x: (symbol("sign", x),)),
    "sign": ("sign({})", lambda x: (0.0,)),
    "square": ("{0} * {0}", lambda x: (2.0 * x,)),
    "exp": ("tl.exp({})", lambda x: (symbol("exp", x),)),
    "log": ("tl.log({})", lambda x: (1.0 / x,)),
    "sqrt": ("tl.sqrt({})", lambda x: (0.5 / symbol("sqrt", x),)),
    "sin": ("tl.sin({})", lambda x: (symbol("cos", x),)),
    "cos": ("tl.cos({})", lambda x: (-symbol("sin", x),)),
    "tanh": ("tanh({})", lambda x: (1.0 - symbol("square", symbol("tanh", x)),)),
    "sigmoid": ("tl.sigmoid({})", lambda x: (symbol("sigmoid", x) * (1.0 - symbol("sigmoid", x)),)),
    "where": ("tl.where({}, {}, {})", None),
    "maximum": ("tl.maximum({}, {})", None),
    "minimum": ("tl.minimum({}, {})", None),
    "lt": ("{} < {}", None),
    "le": ("{} <= {}", None),
    "gt": ("{} > {}", None),
    "ge": ("{} >= {}", None),
    "eq": ("{} == {}", None),
    "ne": ("{} != {}", None),
    "bitwise_and": ("{} & {}", None),
    "bitwise_or": ("{} | {}", None),
    "bitwise_xor": ("{} ^ {}", None),
    "logical_and": ("{} & {}", None),
    "logical_or": ("{} | {}", None),
    "logical_not": ("{} == 0", None),
}
CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not")
BINARY = {name: name for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")} | {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


def symbol(operation: str, *operands: Any) -> Symbol:
    """Return an operation on symbols and numbers."""
    for operand in operands:
        if isinstance(operand, Tensor):
            raise TypeError("a mod cannot read a tensor. Pass it as bias, mask or alibi_slopes.")
        if not isinstance(operand, Symbol | bool | int | float):
            raise TypeError(f"a mod computes with its arguments and numbers, not with a {type(operand).__name__}")
    return Symbol(operation, *operands)


for _method, _operation in BINARY.items():
    setattr(Symbol, f"__{_method}__", lambda x, y, name=_operation: symbol(name, x, y))
    if _operation not in CONDITIONS:  # Python reflects comparisons by itself
        setattr(Symbol, f"__r{_method}__", lambda x, y, name=_operation: symbol(name, y, x))
for _method, _operation in {"neg": "neg", "abs": "abs", "invert": "logical_not"}.items():
    setattr(Symbol, f"__{_method}__", lambda x, name=_operation: symbol(name, x))


def _derivative(x: Any) -> Any:
    """Return the derivative of an expression with respect to the score."""
    if not isinstance(x, Symbol) or x.operation in CONDITIONS:
        return 0.0
    if x.operation in SCORE:
        return 1.0 if x.operation == "score" else 0.0
    if x.operation in ("where", "maximum", "minimum"):
        chosen, choices = x.operands[0], x.operands[1:]
        if x.operation != "where":
            chosen, choices = symbol("ge" if x.operation == "maximum" else "le", *x.operands), x.operands
        slopes = [_derivative(choice) for choice in choices]
        return 0.0 if _are_zero(*slopes) else symbol("where", chosen, *slopes)
    inner = [_derivative(operand) for operand in x.operands]
    if _are_zero(*inner):
        return 0.0
    derivatives = OPERATIONS[x.operation][1]
    if derivatives is None:
        raise TypeError(f"{x.operation} of the score has no gradient. Apply it to the indices alone.")
    pairs = zip(derivatives(*x.operands), inner, strict=True)
    terms = [_product(slope, outer) for outer, slope in pairs if not _are_zero(slope)]
    return functools.reduce(lambda a, b: a + b, terms)


def _are_zero(*values: Any) -> bool:
    return all(not isinstance(value, Symbol) and value == 0 for value in values)


def _product(x: Any, y: Any) -> Any:
    return y if not isinstance(x, Symbol) and x == 1 else x * y


def _written(name: str, arguments: Sequence[str], result: Any) -> str:
    """Return a Triton function of these arguments that computes an expression."""
    if not isinstance(result, Symbol | bool | int | float):
        raise TypeError(f"a mod returns an expression of its arguments, not a {type(result).__name__}")
    lines: list[str] = []
    names: dict[int, str] = {}

    def write(x: Any) -> str:
        if not isinstance(x, Symbol):
            return f'float("{x}")' if repr(x) in ("inf", "-inf", "nan") else repr(x)
        if x.operation in SCORE:
            return x.operation
        if id(x) not in names:
            operands = [write(operand) for operand in x.operands]
            names[id(x)] = f"x{len(names)}"
            lines.append(f"    {names[id(x)]} = {OPERATIONS[x.operation][0].format(*operands)}\n")
        return names[id(x)]

    returned = write(result)
    if not isinstance(result, Symbol):  # a tensor, as any other result
        returned = f"tl.full(kv_idx.shape, {returned}, {'tl.float32' if 'score' in arguments else 'tl.int1'})"
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{''.join(lines)}    return {returned}\n"


@dataclass(frozen=True)
class Mod:
    """A function of a score and its place, or of a place alone, for kernels and for tensors."""

    function: JITFunction[Any]
    gradient: JITFunction[Any] | None  # with respect to the score
    uses: frozenset[str]  # names of arguments
    on_tensors: Callable[..., Tensor]


def score_mod_key(function: Any) -> str:
    """Return the key of a function of (score, b, h, q_idx, kv_idx) that returns a score."""
    if isinstance(function, JITFunction):
        return _keep(function)
    result = function(*map(Symbol, SCORE))
    return _written("mod", SCORE, result) + "\n\n" + _written("mod_gradient", SCORE, _derivative(result))


def mask_mod_key(function: Any) -> str:
    """Return the key of a function of (b, h, q_idx, kv_idx) that returns whether the key is visible."""
    return (
        _keep(function)
        if isinstance(function, JITFunction)
        else _written("mod", PLACES, function(*map(Symbol, PLACES)))
    )


@functools.lru_cache(1024)
def mod(key: str) -> Mod:
    """Return the mod of a key: that of a Python function is its source in Triton."""
    if kept := _KEPT.get(key):
        return Mod(kept, None, _names_used(kept.src, kept.arg_names), _only_in_kernels)
    # Triton reads the source of a function, so it is kept as that of a file.
    file = f"<mod {hashlib.sha256(key.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = len(key), None, key.splitlines(keepends=True), file
    code = compile(key, file, "exec")
    helpers = {"floor_divide": floor_divide, "modulo": modulo, "sign": sign, "tanh": tanh}
    in_triton: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl, **helpers}
    exec(code, in_triton)
    in_torch: dict[str, Any] = {"triton": SimpleNamespace(jit=lambda function: function), "tl": _TORCH, **vars(_TORCH)}
    exec(code, in_torch)
    function, gradient = in_triton["mod"], in_triton.get("mod_gradient")
    return Mod(function, gradient, _names_used(function.src, function.arg_names), in_torch["mod"])


_KEPT: dict[str, JITFunction[Any]] = {}  # functions that are in Triton already
# What a mod calls, on tensors.
_TORCH = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("abs", "exp", "log", "sqrt", "sin", "cos", "sigmoid", "where", "full")},
    maximum=lambda x, y: torch.maximum(*torch.broadcast_tensors(torch.as_tensor(x), torch.as_tensor(y))),
    minimum=lambda x, y: torch.minimum(*torch.broadcast_tensors(torch.as_tensor(x), torch.as_tensor(y))),
    floor_divide=lambda x, y: x // y,
    modulo=lambda x, y: x % y,
    sign=torch.sign,
    tanh=torch.tanh,
    float32=torch.float32,
    int1=torch.bool,
)


@constant_when_compiled
def _keep(function: JITFunction[Any]) -> str:
    key = f"{function.__module__}.{function.__qualname__} {function.cache_key}"
    _KEPT[key] = function
    return key


def _names_used(source: str, arguments: Sequence[str]) -> frozenset[str]:
    """Return which arguments a function uses, by the names that kernels have for them."""
    body = ast.parse(source).body[0]
    names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    places = SCORE[-len(arguments) :]
    return frozenset(ours for ours, theirs in zip(places, arguments, strict=True) if theirs in names)


def _only_in_kernels(*_: Any) -> Tensor:
    raise TypeError("only a kernel can call a @triton.jit mod. Write it as a Python function.")
