"""Translation of a `@triton.jit` function into a Python function in which `triton.language` computes with NumPy.

Triton itself is not patched. An `Executable` is the kernel's own source, compiled against a separate namespace in which
Triton's builtins use the interpreter's semantic layer, called kernels are executables too, and tensors are `Value`s,
whose operators need no compiler.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.compiler.code_generator import get_jit_fn_file_line
from triton.language import core, standard, target_info
from triton.language.extra import cuda
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable, JITFunction

from tilewright.interpreter import numerics
from tilewright.interpreter.builder import BUILDER, SEMANTIC, TARGET, Handle, same_batch
from tilewright.interpreter.exceptions import IS_KERNEL, DeviceError, Diverged, UnsupportedFeature

_LIBDEVICE: Any = cuda.libdevice


def unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


class Value(tl.tensor):
    """A tensor of the interpreter; its operators and methods are set below, from Triton's own."""

    type: Any

    def __bool__(self) -> bool:
        if self.type.is_block() and self.numel.value != 1:
            raise ValueError("the truth value of a block is ambiguous; use tl.where, or reduce it to a scalar")
        return _uniform(_per_program(self) != 0)

    def __index__(self) -> int:
        return int(uniform(self))

    @property
    def T(self) -> Value:  # type: ignore[override]  # noqa: N802  Triton's name
        return _builtin(core.trans)(self)

    __hash__ = None  # type: ignore[assignment]


class Descriptor(tl.tensor_descriptor):
    """A tensor descriptor of the interpreter."""


def _per_program(scalar: tl.tensor) -> np.ndarray:
    return scalar.handle.data.reshape(scalar.handle.data.shape[0], -1)[:, 0]


def _uniform(data: np.ndarray) -> Any:
    """Return the value that all programs have in common, or raise Diverged."""
    if len(data) > 1 and (data != data[0]).any():
        raise Diverged(data)
    return data[0].item()


def uniform(value: Any) -> Any:
    """Return the Python value that all programs of the batch have in common, or raise Diverged."""
    value = unwrap(value)
    return _uniform(_per_program(value)) if isinstance(value, tl.tensor) else value


def adopt(result: Any) -> Any:
    """Convert the result of one of Triton's functions: tensors to `Value`s, constexprs to what they hold."""
    result = unwrap(result)
    cls = type(result)
    if cls is tl.tensor:
        result.__class__ = Value
    elif cls is tl.tensor_descriptor:
        result.__class__ = Descriptor
    elif cls in (tuple, list):
        return cls(adopt(r) for r in result)
    elif cls is tl.tuple:
        return tuple(adopt(r) for r in result.values)
    return result


def tensor(data: np.ndarray, ty: tl.dtype) -> Value:
    """Return a `Value` of this scalar type; axis 0 of the array is the program axis."""
    shape = list(data.shape[1:])
    return Value(Handle(data, ty), tl.block_type(ty, shape) if shape else ty)


@functools.cache
def _builtin(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of triton.language that computes instead of emitting IR."""
    takes_generator = "_generator" in inspect.signature(fn).parameters

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = SEMANTIC
        if not takes_generator:
            kwargs.pop("_generator", None)
        return adopt(fn(*map(_as_constexpr, args), **{name: _as_constexpr(value) for name, value in kwargs.items()}))

    return call


def _as_constexpr(value: Any) -> Any:
    """Wrap a string, since some of Triton's functions read its `.value`."""
    return tl.constexpr(value) if isinstance(value, str) else value


# Replacements of the functions that Triton implements only in its compiler.


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    if isinstance(input, tl.tensor):
        return _reduce((input,), axis, combine_fn, keep_dims)[0]
    axis, keep_dims = unwrap(axis), unwrap(keep_dims)
    rank = len(input[0].shape)
    if axis is None:
        input = tuple(_builtin(core.reshape)(t, [t.numel.value]) for t in input)
        out = _reduced(input, 0, combine_fn)
        for _dim in range(rank if keep_dims else 0):
            out = tuple(_builtin(core.expand_dims)(t, 0) for t in out)
        return out
    axis %= rank
    out = _reduced(input, axis, combine_fn)
    return tuple(_builtin(core.expand_dims)(t, axis) for t in out) if keep_dims else out


def _reduced(input: tuple[Any, ...], axis: int, combine_fn: Any) -> tuple[Any, ...]:
    """Combine halves until one element is left, as a block's threads do."""
    axis += 1
    dtypes = [t.type.scalar for t in input]
    arrays = [t.handle.data for t in input]
    while (length := arrays[0].shape[axis]) > 1:
        low = [_slice(a, axis, 0, length // 2) for a in arrays]
        high = [_slice(a, axis, length // 2, length) for a in arrays]
        arrays = _combined(combine_fn, low, high, dtypes)
    return tuple(tensor(a.squeeze(axis), dtype) for a, dtype in zip(arrays, dtypes, strict=True))


def _slice(array: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(start, stop),)]


_UFUNCS: dict[Any, Callable[..., np.ndarray]] = {
    "_sum_combine": np.add,
    "_elementwise_max": numerics.maximum,
    "_elementwise_min": numerics.minimum,
    "_xor_combine": np.bitwise_xor,
    "_or_combine": np.bitwise_or,
    "_prod_combine": np.multiply,
}


def _combined(combine_fn: Any, a: list[np.ndarray], b: list[np.ndarray], dtypes: list[tl.dtype]) -> list[np.ndarray]:
    name = getattr(combine_fn, "__name__", "")
    ufunc = _UFUNCS.get(name)
    if ufunc is not None and len(a) == 1 and getattr(combine_fn, "origin", None) is getattr(standard, name, None):
        dtype = dtypes[0]
        x, y = (numerics.unsigned(a[0]), numerics.unsigned(b[0])) if dtype.is_int_unsigned() else (a[0], b[0])
        if dtype.is_bool() and ufunc is np.add:
            ufunc = np.logical_xor  # one bit wraps around
        BUILDER.tick()
        out = ufunc(x, y)
        return [numerics.rounded(out, dtype) if dtype.is_floating() else numerics.signed(out)]
    results = _lanewise(combine_fn, a + b, dtypes * 2)
    if (result_types := [ty for _, ty in results]) != dtypes:
        raise TypeError(f"{name} returns {result_types} for arguments of {dtypes}")
    return [x for x, _ in results]


def _lanewise(fn: Any, arrays: list[np.ndarray], dtypes: list[tl.dtype]) -> list[tuple[np.ndarray, tl.dtype]]:
    """Apply a function of scalars to arrays; lanes take the place of programs, so they may diverge too."""
    arrays = list(np.broadcast_arrays(*arrays))
    size, shape = arrays[0].size, arrays[0].shape
    out: list[np.ndarray] = []
    result_types: list[tl.dtype] = []
    groups = [np.arange(size)]
    while groups:
        lanes = groups.pop()
        try:
            results = fn(*[tensor(a.reshape(-1)[lanes], dtype) for a, dtype in zip(arrays, dtypes, strict=True)])
        except Diverged as diverged:
            groups.extend(lanes[diverged.keys == key] for key in np.unique(diverged.keys))
            continue
        results = results if isinstance(results, tuple) else (results,)
        result_types = [result.dtype for result in results]
        out = out or [np.zeros(size, result.handle.data.dtype) for result in results]
        for array, result in zip(out, results, strict=True):
            array[lanes] = result.handle.data
    return [(array.reshape(shape), dtype) for array, dtype in zip(out, result_types, strict=True)]


def _associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    """Scan by doubling the stride: after step k, each element combines up to 2**k elements."""
    if isinstance(input, tl.tensor):
        return _associative_scan((input,), axis, combine_fn, reverse)[0]
    axis = unwrap(axis) % len(input[0].shape) + 1
    dtypes = [t.type.scalar for t in input]
    arrays = [np.flip(t.handle.data, axis) if unwrap(reverse) else t.handle.data for t in input]
    length, stride = arrays[0].shape[axis], 1
    while stride < length:
        before = [_slice(a, axis, 0, length - stride) for a in arrays]
        after = [_slice(a, axis, stride, length) for a in arrays]
        joined = _combined(combine_fn, before, after, dtypes)
        heads = [_slice(a, axis, 0, stride) for a in arrays]
        arrays = [np.concatenate(same_batch(h, j), axis) for h, j in zip(heads, joined, strict=True)]
        stride *= 2
    arrays = [np.flip(a, axis) if unwrap(reverse) else a for a in arrays]
    return tuple(tensor(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True))


def _reduce_with_indices(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    axis, data = unwrap(axis), input.handle.data
    index = np.arange(data.shape[1:][axis], dtype=np.int32)
    index = np.expand_dims(index, tuple(d for d in range(data.ndim) if d != axis % (data.ndim - 1) + 1))
    return _reduce((input, tensor(np.broadcast_to(index, data.shape), tl.int32)), axis, combine_fn, keep_dims)


def _map_elementwise(scalar_fn: Any, *args: Any, pack: int = 1, **_: Any) -> Any:
    args, pack = SEMANTIC.broadcast_tensors(*args), unwrap(pack)
    shape = args[0].handle.data.shape[1:]
    arrays = [t.handle.data.reshape(t.handle.data.shape[0], -1, pack) for t in args]
    dtypes = [t.type.scalar for t in args for _ in range(pack)]
    out = _lanewise(scalar_fn, [a[..., i] for a in arrays for i in range(pack)], dtypes)  # `pack` neighbours per call
    results = [
        tensor(np.stack([x for x, _ in out[n : n + pack]], axis=-1).reshape(-1, *shape), out[n][1])
        for n in range(0, len(out), pack)
    ]
    return tuple(results) if len(results) > 1 else results[0]


def _range(*bounds: Any, **_options: Any) -> Iterator[Any]:
    """Iterate over a range with a tensor as loop variable: int32, or wider if a bound is, as in a compiled kernel.

    Programs with different bounds stay in one batch if their trip counts are equal.
    """
    start, stop, step = _bounds(bounds)
    if len(bounds) > 2 and isinstance(unwrap(bounds[2]), tl.tensor) and (step < 0).any():
        if ((step < 0) & (start < stop)).any():
            raise DeviceError("the loop never ends: its step is negative and not a constexpr")
        stop = np.where(step < 0, start, stop)  # a compiled loop counts up unless its step is a negative constexpr
    trips = np.maximum(-((start - stop) // step), 0)
    if len(trips) > 1 and (trips != trips[0]).any():
        raise Diverged(trips)
    bound_types = [SEMANTIC.to_tensor(unwrap(b)).dtype for b in (0, *bounds)]
    dtype = functools.reduce(SEMANTIC.integer_promote_impl, bound_types)
    for trip in range(int(trips[0])):
        BUILDER.tick()
        yield tensor((start + trip * step).astype(numerics.numpy_type(dtype)), dtype)


def _bounds(bounds: tuple[Any, ...]) -> list[np.ndarray]:
    """Return start, stop and step, one value per program or one for all."""
    rows = [_per_program(b) if isinstance(b, tl.tensor) else np.array([b]) for b in map(unwrap, bounds)]
    start_stop = [np.zeros(1, np.int64), *rows] if len(rows) == 1 else rows
    three = start_stop if len(start_stop) > 2 else [*start_stop, np.ones(1, np.int64)]
    return list(np.broadcast_arrays(*(r.astype(np.int64) for r in three)))


def _static_range(*bounds: Any, **_options: Any) -> Iterator[int]:
    for i in range(*(int(uniform(b)) for b in bounds)):
        BUILDER.tick()
        yield i


def _range_with_keywords(make: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(arg1: Any, arg2: Any = None, step: Any = None, **options: Any) -> Iterator[Any]:
        bounds = (arg1,) if arg2 is None else (arg1, arg2)
        if step is not None:
            bounds = (*((0, arg1) if arg2 is None else bounds), step)
        return make(*bounds)

    return call


def _static_assert(condition: Any, message: Any = "", **_: Any) -> None:
    if not unwrap(condition):
        raise AssertionError(unwrap(message) or "tl.static_assert failed")


def _hint(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _static_print(*args: Any, **options: Any) -> None:
    print(*[unwrap(a) for a in args], **{k: v for k, v in options.items() if not k.startswith("_")})


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "reduce": _reduce,
    "associative_scan": _associative_scan,
    "_reduce_with_indices": _reduce_with_indices,
    "map_elementwise": _map_elementwise,
    "range": _range_with_keywords(_range),
    "static_range": _range_with_keywords(_static_range),
    "static_assert": _static_assert,
    "static_print": _static_print,
    "multiple_of": _hint,
    "max_contiguous": _hint,
    "max_constancy": _hint,
}
_OVERRIDES = {id(getattr(core, name)): fn for name, fn in _REPLACEMENTS.items() if hasattr(core, name)}
_OVERRIDES |= {
    id(core.condition): lambda value, **_: value,
    id(core.constexpr): unwrap,
    id(cuda.gdc_wait): lambda **_: None,  # launches run one after the other
    id(cuda.gdc_launch_dependents): lambda **_: None,
    id(target_info.current_target): lambda: TARGET,
    id(target_info.is_cuda): lambda: True,
    id(target_info.cuda_capability_geq): lambda major, minor=0: TARGET.arch >= 10 * unwrap(major) + unwrap(minor),
}


def _device_print(*args: Any, **options: Any) -> None:
    prefix, rest = (args[0], args[1:]) if args and isinstance(args[0], str) else ("", args)
    _builtin(core.device_print)(prefix, *rest, **{k: v for k, v in options.items() if k == "hex"})


class Namespace:
    """A module as an executable sees it."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = translated(getattr(self._module, name))
        setattr(self, name, value)
        return value


_namespace = functools.cache(Namespace)


def translated(value: Any) -> Any:
    """Translate a value from the kernel's module to what its executable uses instead."""
    value = unwrap(value)
    if id(value) in _OVERRIDES:
        return _OVERRIDES[id(value)]
    if isinstance(value, types.ModuleType):
        if value.__name__.startswith("triton.experimental.gluon"):
            raise UnsupportedFeature("Gluon")
        if value.__name__ == "triton.language.extra.libdevice":
            return _namespace(_LIBDEVICE)
        return _namespace(value)
    if isinstance(value, JITFunction | InterpretedFunction):
        return executable(value)
    if isinstance(value, types.FunctionType) and core.is_builtin(value):
        return _builtin(value)
    if isinstance(value, types.FunctionType) and value.__module__ == "triton.language.extra.libdevice":
        return translated(getattr(_LIBDEVICE, value.__name__))
    return value


_BUILTINS = {
    **vars(builtins),
    "range": _range_with_keywords(_range),
    "print": _device_print,
    "min": _builtin(core.builtin_min),
    "max": _builtin(core.builtin_max),
}


class Executable:
    """A jitted function that computes when called."""

    def __init__(self, function: Any):
        self.origin = function
        self.fn = function.fn
        self.__name__ = self.fn.__name__
        self._code = _rewritten(function)
        self._names = _names(self._code) - _HELPERS.keys()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.bind()(*args, **kwargs)

    def bind(self) -> Callable[..., Any]:
        """Return the function, bound to the current values of its module's globals."""
        captured = zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True)
        scope = ChainMap({name: cell.cell_contents for name, cell in captured}, self.fn.__globals__)
        is_users = not self.fn.__module__.startswith("triton.language")
        names: dict[str, Any] = {"__builtins__": _BUILTINS, IS_KERNEL: is_users, **_HELPERS}
        constants = self.fn.__globals__.get("__annotations__", {})
        for name in self._names & set(scope):
            if not is_users or _may_be_global(scope[name]) or "constexpr" in str(constants.get(name)):
                names[name] = translated(scope[name])
        function = types.FunctionType(self._code, names, self.__name__)
        function.__defaults__ = tuple(translated(d) for d in self.fn.__defaults__ or ())
        function.__kwdefaults__ = {k: translated(d) for k, d in (self.fn.__kwdefaults__ or {}).items()}
        return function


def _may_be_global(value: Any) -> bool:
    """Return whether Triton lets a kernel read this global; a plain number could change after compilation."""
    allowed = (tl.constexpr, tl.dtype, types.ModuleType, type, JITCallable, InterpretedFunction)
    module = getattr(value, "__module__", None) or ""
    return (
        isinstance(value, allowed) or core.is_builtin(value) or module.startswith("triton") or hasattr(value, "_fields")
    )


_EXECUTABLES: dict[Any, Executable] = {}


def executable(function: Any) -> Executable:
    key = function.fn, getattr(function, "src", None)  # programs may replace the source
    if key not in _EXECUTABLES:
        _EXECUTABLES[key] = Executable(function)
    return _EXECUTABLES[key]


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


# Helpers that the rewritten source of a kernel calls.


def _assigned(value: Any) -> Any:
    """Convert a Python number that is assigned or returned to a tensor, as a compiled kernel does."""
    value = unwrap(value)
    if isinstance(value, bool | int | float):
        return adopt(SEMANTIC.to_tensor(value))
    if type(value) is tuple:
        return tuple(_assigned(v) for v in value)
    return value


def _and(*parts: Callable[[], Any]) -> Any:
    return _logical(parts, SEMANTIC.logical_and, short_circuits_on=False)


def _or(*parts: Callable[[], Any]) -> Any:
    return _logical(parts, SEMANTIC.logical_or, short_circuits_on=True)


def _logical(parts: tuple[Callable[[], Any], ...], join: Callable[[Any, Any], Any], short_circuits_on: bool) -> Any:
    """Short-circuit on constants, as Python does; evaluate and combine all tensors, as Triton does."""
    value, tensors = None, []
    for part in parts:
        value = unwrap(part())
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is short_circuits_on:
            return value
    return adopt(functools.reduce(join, tensors)) if tensors else value


def _not(a: Any) -> Any:
    a = unwrap(a)
    return adopt(SEMANTIC.not_(a)) if isinstance(a, tl.tensor) else not a


def _conditional(test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """Evaluate `yes if test else no`; the result is a tensor if the test is one."""
    test = unwrap(test)
    chosen = yes() if test else no()
    return _assigned(chosen) if isinstance(test, tl.tensor) else chosen


def _plain(value: Any) -> Any:
    """Unwrap a shape or a size, since constexprs are plain numbers here."""
    return tl.tuple([adopt(v) for v in value.values]) if isinstance(value, tl.tuple) else unwrap(value)


def _value_of(value: Any) -> Any:
    """Evaluate `.value` of a constexpr, which may have been unwrapped already."""
    return value if isinstance(value, bool | int | float | str | tl.dtype | type(None)) else value.value


def _type_of(value: Any) -> Any:
    """Evaluate `.type`, which constexprs have too."""
    is_constant = isinstance(value, bool | int | float | str | tuple | type(None))
    return tl.constexpr_type(value) if is_constant else value.type


_HELPERS: dict[str, Any] = {
    "__type_of__": _type_of,
    "__assigned__": _assigned,
    "__unwrapped__": unwrap,
    "__and__": _and,
    "__or__": _or,
    "__not__": _not,
    "__conditional__": _conditional,
    "__plain__": _plain,
    "__value_of__": _value_of,
    "__tick__": BUILDER.tick,
}


_SHAPES = ("shape", "strides", "numel")
_ATTRIBUTES = {"value": "__value_of__", "type": "__type_of__"}


class _Rewriter(ast.NodeTransformer):
    """Rewrites the constructs whose semantics differ between Python and Triton."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list, node.returns = [], None
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            argument.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [ast.Constant(None) if d is not None else None for d in arguments.kw_defaults]
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        node.value = _call("__assigned__", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        now = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.copy_location(ast.Assign([node.target], _call("__assigned__", now)), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        constant = "constexpr" in ast.unparse(node.annotation)
        value = _call("__unwrapped__" if constant else "__assigned__", self.visit(node.value))
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is not None:
            node.value = _call("__assigned__", node.value)
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        return ast.copy_location(ast.Pass(), node)  # Triton compiles it only in debug mode

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "__and__" if isinstance(node.op, ast.And) else "__or__"
        return ast.copy_location(_call(name, *map(_lambda, node.values)), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return ast.copy_location(_call("__conditional__", node.test, _lambda(node.body), _lambda(node.orelse)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return ast.copy_location(_call("__not__", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        sides = [node.left, *node.comparators]
        pairs = [ast.Compare(a, [op], [b]) for a, op, b in zip(sides[:-1], node.ops, sides[1:], strict=True)]
        return ast.copy_location(_call("__and__", *map(_lambda, pairs)), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.attr in _ATTRIBUTES:
            return ast.copy_location(_call(_ATTRIBUTES[node.attr], node.value), node)
        return ast.copy_location(_call("__plain__", node), node) if node.attr in _SHAPES else node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("__tick__")))
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


def _rewritten(function: Any) -> types.CodeType:
    fn = function.fn
    if isinstance(function, JITCallable):
        text, first = function.src, get_jit_fn_file_line(function)[1]
    else:
        lines, first = inspect.getsourcelines(fn)
        text = textwrap.dedent("".join(lines))
    tree = ast.parse(text)
    tree = ast.fix_missing_locations(_Rewriter().visit(tree))
    ast.increment_lineno(tree, first - 1)
    module = compile(tree, inspect.getsourcefile(fn) or "<kernel>", "exec")
    return next(c for c in module.co_consts if isinstance(c, types.CodeType) and c.co_name == fn.__name__)


def _member(member: Any, name: str) -> Any:
    if name in _REPLACEMENTS:
        return _REPLACEMENTS[name]
    if isinstance(member, JITFunction | InterpretedFunction):
        return lambda self, *args, **kwargs: executable(member)(self, *args, **kwargs)
    return _builtin(member)


for _class in (Value, Descriptor):
    for _base in reversed(_class.__mro__[1:]):
        for _name, _found in list(vars(_base).items()):
            _is_method = core.is_builtin(_found) or isinstance(_found, JITFunction | InterpretedFunction)
            if _is_method and _name not in vars(_class):
                setattr(_class, _name, _member(_found, _name))
