"""Tensors of the interpreter, and Triton's builtins on them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core

from tilewright.interpreter.builder import ACTIVE
from tilewright.interpreter.exceptions import Diverged
from tilewright.interpreter.values import Handle


def unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


class Value(tl.tensor):
    """A tensor of the interpreter; its operators and methods are set below, from Triton's own."""

    type: Any

    def __bool__(self) -> bool:
        if self.type.is_block() and self.numel.value != 1:
            raise ValueError("the truth value of a block is ambiguous; use tl.where, or reduce it to a scalar")
        return uniform_value(per_program(self.handle) != 0)

    def __index__(self) -> int:
        return int(uniform(self))

    @property
    def T(self) -> Value:  # type: ignore[override]  # noqa: N802  Triton's name
        return builtin(core.trans)(self)

    __hash__ = None  # type: ignore[assignment]


class Descriptor(tl.tensor_descriptor):
    """A tensor descriptor of the interpreter."""


class Shape(tl.tuple):
    """A tuple of numbers that can be appended to a Python list or tuple."""

    def __radd__(self, other: list[Any] | tuple[Any, ...]) -> Shape:
        return Shape([*other, *self.values])


ADOPTED: dict[type, type] = {tl.tensor: Value, tl.tensor_descriptor: Descriptor}


def per_program(handle: Handle) -> np.ndarray:
    """Return the value of each program, on which control flow depends; a poisoned one is reported and counts as 0."""
    data = handle.data.reshape(handle.data.shape[0], -1)[:, 0]
    if handle.poison is None:
        return data
    ACTIVE.builder.memory.use(handle.poison, "branch")
    return np.where(np.broadcast_to(handle.poison, handle.data.shape).reshape(len(data), -1)[:, 0], 0, data)


def uniform_value(data: np.ndarray) -> Any:
    """Return the value that all programs have in common, or raise Diverged."""
    if len(data) > 1 and (data != data[0]).any():
        raise Diverged(data)
    return data[0].item()


def uniform(value: Any) -> Any:
    """Return the Python value that all programs of the batch have in common, or raise Diverged."""
    value = unwrap(value)
    return uniform_value(per_program(value.handle)) if isinstance(value, tl.tensor) else value


def adopt(result: Any) -> Any:
    """Convert the result of one of Triton's functions: tensors to `Value`s, constexprs to what they hold."""
    result = unwrap(result)
    cls = type(result)
    if cls in ADOPTED:
        result.__class__ = ADOPTED[cls]
        if hasattr(result.type, "layout"):
            result.handle.layout = result.type.layout
    elif cls in (tuple, list):
        return cls(adopt(r) for r in result)
    elif cls is tl.tuple:
        return tuple(adopt(r) for r in result.values)
    return result


def tensor(data: np.ndarray, ty: tl.dtype, reached: np.ndarray | None = None, layout: Any = None) -> Value:
    """Return a `Value` of this scalar type; axis 0 of the array is the program axis."""
    shape = list(data.shape[1:])
    handle = Handle(data, ty)
    handle.poison = reached
    return Value(handle, ACTIVE.builder.block_type(ty, shape, layout) if shape else ty)


@functools.cache
def builtin(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of triton.language that computes instead of emitting IR."""
    takes_generator = "_generator" in inspect.signature(fn).parameters

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        ACTIVE.calling = fn.__name__
        kwargs["_semantic"] = ACTIVE.semantic
        if takes_generator:
            kwargs.setdefault("_generator", ACTIVE.builder.generator)
        else:
            kwargs.pop("_generator", None)
        return adopt(fn(*map(_as_constexpr, args), **{name: _as_constexpr(value) for name, value in kwargs.items()}))

    return call


def _as_constexpr(value: Any) -> Any:
    """Wrap a string, since some of Triton's functions read its `.value`."""
    return tl.constexpr(value) if isinstance(value, str) else value
