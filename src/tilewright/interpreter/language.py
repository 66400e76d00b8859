"""Translation of a `@triton.jit` function into a Python function in which `triton.language` computes with NumPy.

Triton itself is not patched. An `Executable` is the kernel's own source, compiled against a separate namespace in which
Triton's builtins use the interpreter's semantic layer, called kernels are executables too, and tensors are `Value`s,
whose operators need no compiler.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, standard, target_info
from triton.language.extra import cuda
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable, JITFunction

from tilewright.interpreter import numerics, unwritten
from tilewright.interpreter.builder import ACTIVE
from tilewright.interpreter.compiler import TARGET
from tilewright.interpreter.exceptions import IS_KERNEL, DeviceError, Diverged, StaticAssertionError
from tilewright.interpreter.rewriting import HELPERS, DynamicRange, rewritten
from tilewright.interpreter.tensors import (
    Descriptor,
    Value,
    builtin,
    per_program,
    tensor,
    uniform,
    unwrap,
)
from tilewright.interpreter.values import same_batch

_LIBDEVICE: Any = cuda.libdevice


# Replacements of the functions that Triton implements only in its compiler.


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    if isinstance(input, tl.tensor):
        return _reduce((input,), axis, combine_fn, keep_dims)[0]
    axis, keep_dims = unwrap(axis), unwrap(keep_dims)
    rank = len(input[0].shape)
    if axis is None:
        input = tuple(builtin(core.reshape)(t, [t.numel.value]) for t in input)
        out = _reduced(input, 0, combine_fn)
        for _dim in range(rank if keep_dims else 0):
            out = tuple(builtin(core.expand_dims)(t, 0) for t in out)
        return out
    axis %= rank
    out = _reduced(input, axis, combine_fn)
    return tuple(builtin(core.expand_dims)(t, axis) for t in out) if keep_dims else out


def _reduced(input: tuple[Any, ...], axis: int, combine_fn: Any) -> tuple[Any, ...]:
    """Combine halves until one element is left, as a block's threads do."""
    ACTIVE.builder.memory.unseen.synchronize()
    layout = ACTIVE.builder.layout_of_reduction(input[0].handle, axis)
    axis += 1
    dtypes = [t.type.scalar for t in input]
    arrays = [t.handle.data for t in input]
    while (length := arrays[0].shape[axis]) > 1:
        low = [_slice(a, axis, 0, length // 2) for a in arrays]
        high = [_slice(a, axis, length // 2, length) for a in arrays]
        arrays = _combined(combine_fn, low, high, dtypes)
    reached = unwritten.reduced([t.handle for t in input], axis)
    return tuple(tensor(a.squeeze(axis), dtype, reached, layout) for a, dtype in zip(arrays, dtypes, strict=True))


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
        ACTIVE.builder.tick()
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
    ACTIVE.builder.memory.unseen.synchronize()
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
    reached = unwritten.scanned([t.handle for t in input], axis, bool(unwrap(reverse)))
    layout = input[0].handle.layout
    return tuple(tensor(a, dtype, reached, layout) for a, dtype in zip(arrays, dtypes, strict=True))


def _reduce_with_indices(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    axis, data = unwrap(axis), input.handle.data
    index = np.arange(data.shape[1:][axis], dtype=np.int32)
    index = np.expand_dims(index, tuple(d for d in range(data.ndim) if d != axis % (data.ndim - 1) + 1))
    indices = tensor(np.broadcast_to(index, data.shape), tl.int32, layout=input.handle.layout)
    return _reduce((input, indices), axis, combine_fn, keep_dims)


def _map_elementwise(scalar_fn: Any, *args: Any, pack: int = 1, **_: Any) -> Any:
    args, pack = ACTIVE.semantic.broadcast_tensors(*args), unwrap(pack)
    shape, layout = args[0].handle.data.shape[1:], args[0].handle.layout
    arrays = [t.handle.data.reshape(t.handle.data.shape[0], -1, pack) for t in args]
    dtypes = [t.type.scalar for t in args for _ in range(pack)]
    out = _lanewise(scalar_fn, [a[..., i] for a in arrays for i in range(pack)], dtypes)  # `pack` neighbours per call
    reached = unwritten.packed([t.handle for t in args], pack)
    results = [
        tensor(np.stack([x for x, _ in out[n : n + pack]], axis=-1).reshape(-1, *shape), out[n][1], reached, layout)
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
    bound_types = [ACTIVE.semantic.to_tensor(unwrap(b)).dtype for b in (0, *bounds)]
    dtype = functools.reduce(ACTIVE.semantic.integer_promote_impl, bound_types)
    for trip in range(int(trips[0])):
        ACTIVE.builder.tick()
        yield tensor((start + trip * step).astype(numerics.numpy_type(dtype)), dtype)


def _bounds(bounds: tuple[Any, ...]) -> list[np.ndarray]:
    """Return start, stop and step, one value per program or one for all."""
    rows = [per_program(b.handle) if isinstance(b, tl.tensor) else np.array([b]) for b in map(unwrap, bounds)]
    start_stop = [np.zeros(1, np.int64), *rows] if len(rows) == 1 else rows
    three = start_stop if len(start_stop) > 2 else [*start_stop, np.ones(1, np.int64)]
    return list(np.broadcast_arrays(*(r.astype(np.int64) for r in three)))


def _static_range(*bounds: Any, **_options: Any) -> Iterator[int]:
    for i in range(*(int(uniform(b)) for b in bounds)):
        ACTIVE.builder.tick()
        yield i


def _range_with_keywords(make: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(arg1: Any, arg2: Any = None, step: Any = None, **options: Any) -> Iterator[Any]:
        bounds = (arg1,) if arg2 is None else (arg1, arg2)
        if step is not None:
            bounds = (*((0, arg1) if arg2 is None else bounds), step)
        return make(*bounds)

    return call


def _dynamic_range(*bounds: Any, **options: Any) -> DynamicRange:
    return DynamicRange(_range_with_keywords(_range)(*bounds, **options))


def _static_assert(condition: Any, message: Any = "", **_: Any) -> None:
    if not unwrap(condition):
        raise StaticAssertionError(unwrap(message) or "tl.static_assert failed")


def _load(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
    if isinstance(other, Value):
        other = tl.tensor(other.handle, other.type)  # Triton looks at its truth value, which a block of ours has not
    return builtin(core.load)(pointer, mask, other, *rest, **options)


def _hint(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _static_print(*args: Any, **options: Any) -> None:
    print(*[unwrap(a) for a in args], **{k: v for k, v in options.items() if not k.startswith("_")})


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "reduce": _reduce,
    "associative_scan": _associative_scan,
    "_reduce_with_indices": _reduce_with_indices,
    "map_elementwise": _map_elementwise,
    "range": _dynamic_range,
    "static_range": _range_with_keywords(_static_range),
    "static_assert": _static_assert,
    "static_print": _static_print,
    "multiple_of": _hint,
    "max_contiguous": _hint,
    "max_constancy": _hint,
}
OVERRIDES = {id(getattr(core, name)): fn for name, fn in _REPLACEMENTS.items() if hasattr(core, name)}
OVERRIDES |= {
    id(core.load): _load,
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
    builtin(core.device_print)(prefix, *rest, **{k: v for k, v in options.items() if k == "hex"})


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
    if id(value) in OVERRIDES:
        return OVERRIDES[id(value)]
    if isinstance(value, types.FunctionType) and (shared := id(vars(value).get("__wrapped__"))) in OVERRIDES:
        return OVERRIDES[shared]  # Gluon wraps the functions that it shares with Triton
    if isinstance(value, types.ModuleType):
        if value.__name__ == "triton.language.extra.libdevice":
            return _namespace(_LIBDEVICE)
        return _namespace(value)
    if isinstance(value, JITFunction | InterpretedFunction):
        return executable(value)
    if getattr(value, "__triton_aggregate__", False):
        return _aggregate(value)
    if isinstance(value, types.FunctionType) and core.is_builtin(value):
        return builtin(value)
    if isinstance(value, types.FunctionType) and value.__module__ == "triton.language.extra.libdevice":
        return translated(getattr(_LIBDEVICE, value.__name__))
    return value


_TRITON = ("triton.language", "triton.experimental.gluon.language")
_BUILTINS = {
    **vars(builtins),
    "range": _dynamic_range,
    "print": _device_print,
    "min": builtin(core.builtin_min),
    "max": builtin(core.builtin_max),
}


class Executable:
    """A jitted function that computes when called."""

    def __init__(self, function: Any):
        self.origin = function
        self.fn = function.fn
        self.__name__ = self.fn.__name__
        self._code = rewritten(function)
        self._names = _names(self._code) - HELPERS.keys()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.bind()(*args, **kwargs)

    def bind(self) -> Callable[..., Any]:
        """Return the function, bound to the current values of its module's globals."""
        captured = zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True)
        scope = ChainMap({name: cell.cell_contents for name, cell in captured}, self.fn.__globals__)
        is_users = not self.fn.__module__.startswith(_TRITON)
        names: dict[str, Any] = {"__builtins__": _BUILTINS, IS_KERNEL: is_users, **HELPERS}
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


def _member(member: Any, name: str) -> Any:
    if name in _REPLACEMENTS:
        return _REPLACEMENTS[name]
    return _method(member) if isinstance(member, JITFunction | InterpretedFunction) else builtin(member)


def _method(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: executable(function)(*args, **kwargs)


def give_methods(cls: type) -> None:
    """Replace the methods that a class inherits from Triton by ones that compute."""
    for base in reversed(cls.__mro__[1:]):
        for name, found in list(vars(base).items()):
            is_method = core.is_builtin(found) or isinstance(found, JITFunction | InterpretedFunction)
            if is_method and name not in vars(cls):
                setattr(cls, name, _member(found, name))


for _class in (Value, Descriptor):
    give_methods(_class)


@functools.cache
def _aggregate(cls: Any) -> type:
    """Return an aggregate whose methods compute, and whose constexpr fields read as plain numbers."""

    def set_field(self: Any, name: str, value: Any) -> None:
        try:
            cls.__setattr__(self, name, value)
        except TypeError:
            cls.__setattr__(self, name, tl.constexpr(value))  # the field may be a constexpr, which is plain here

    fields = {"__setattr__": set_field, "__getattribute__": lambda self, name: unwrap(cls.__getattribute__(self, name))}
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    methods = {n: _method(m) for n, m in members.items() if isinstance(m, JITFunction | InterpretedFunction)}
    return type(cls.__name__, (cls,), fields | methods)
