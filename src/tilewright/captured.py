"""References that hold tensors of their own: modules, closures, and functions that read global tensors.

The verifier calls a reference on other devices and in float64, where torch refuses to mix its tensors with the
arguments. `portable` returns a reference that calls a copy of itself whose tensors are where the arguments are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Convert = Callable[[Tensor], Tensor]


def portable(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference that takes arguments on any device and in float64; itself if it holds no tensors."""
    if isinstance(reference, Portable) or _rebound(reference, lambda t: t.to("meta"), {}) is reference:
        return reference
    return Portable(reference)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; `(*args)` for a builtin, which has none."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


class Portable:
    """A reference whose tensors follow its arguments: to their device, and to float64 if all of them are float64.

    The tensors are constants, without gradients.
    """

    def __init__(self, reference: Callable[..., Any]):
        self._reference = reference
        self._copies: dict[tuple[torch.device, bool], Callable[..., Any]] = {}
        self.__name__ = getattr(reference, "__name__", type(reference).__name__)
        self.__signature__ = signature_of(reference.forward if isinstance(reference, nn.Module) else reference)

    def __call__(self, *args: Any) -> Any:
        return self.bound_to(args)(*args)

    def bound_to(self, args: Any) -> Callable[..., Any]:
        """Return the copy for these arguments."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        floats = [t for t in tensors if t.is_floating_point()]
        device = tensors[0].device if tensors else torch.device("cpu")
        is_wide = bool(floats) and all(t.dtype == torch.float64 for t in floats)
        if (device, is_wide) not in self._copies:
            convert = functools.partial(_converted, device=device, is_wide=is_wide)
            self._copies[device, is_wide] = _rebound(self._reference, convert, {})
        return self._copies[device, is_wide]


def _converted(tensor: Tensor, device: torch.device, is_wide: bool) -> Tensor:
    wide = torch.float64 if is_wide and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device, wide, copy=True)


def _rebound(value: Any, convert: Convert, seen: dict[int, Any]) -> Any:
    """Return a value with all tensors that it holds converted; the value itself if it holds none."""
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value
    seen[id(value)] = found = _rebuilt(value, convert, lambda held: _rebound(held, convert, seen))
    return found


def _rebuilt(value: Any, convert: Convert, rebound: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, nn.Module):
        return _rebound_module(value, convert)
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, rebound)
    if isinstance(value, types.MethodType):
        owner = value.__self__ if isinstance(value.__self__, type) else rebound(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        parts: tuple[Any, ...] = (value.func, value.args, value.keywords)
        made: list[Any] = [rebound(part) for part in parts]
        fn, args, keywords = made
        return value if all(map(_is, made, parts)) else functools.partial(fn, *args, **keywords)
    if type(value) in (list, tuple):
        items = [rebound(item) for item in value]
        return value if all(map(_is, items, value)) else type(value)(items)
    if type(value) is dict:
        items = {key: rebound(item) for key, item in value.items()}
        return value if all(map(_is, items.values(), value.values())) else items
    if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        held = rebound(vars(value))
        if held is not vars(value):
            value = copy.copy(value)
            vars(value).update(held)
    return value


def _rebound_module(module: nn.Module, convert: Convert) -> nn.Module:
    """Return a copy of a module with its parameters, buffers and other tensor attributes converted."""
    made = copy.deepcopy(module)._apply(convert).requires_grad_(False)
    for part in made.modules():
        for name, held in vars(part).items():
            if isinstance(held, Tensor):
                setattr(part, name, convert(held))
    return made


def _rebound_function(fn: types.FunctionType, rebound: Callable[[Any], Any]) -> types.FunctionType:
    """Return a copy of a function whose closure, defaults and globals hold converted tensors."""
    cells = fn.__closure__ or ()
    before = [_contents(cell) for cell in cells]
    closed = [rebound(held) for held in before]
    defaults = rebound(fn.__defaults__)
    names = [name for name in _global_names(fn.__code__) if _may_hold_tensors(fn, name)]
    found = {name: rebound(fn.__globals__[name]) for name in names}
    changed = {name: held for name, held in found.items() if held is not fn.__globals__[name]}
    if all(map(_is, closed, before)) and defaults is fn.__defaults__ and not changed:
        return fn
    pairs = zip(cells, closed, before, strict=True)
    rebuilt = tuple(cell if new is old else types.CellType(new) for cell, new, old in pairs)
    made = types.FunctionType(fn.__code__, fn.__globals__ | changed, fn.__name__, defaults, rebuilt)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _may_hold_tensors(fn: types.FunctionType, name: str) -> bool:
    """Return whether a global is a tensor, a module, or a function of the same file."""
    held = fn.__globals__.get(name)
    if isinstance(held, types.FunctionType):
        return held.__module__ == fn.__module__
    return isinstance(held, Tensor | nn.Module | list | tuple | dict | functools.partial)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is(one: Any, other: Any) -> bool:
    return one is other
