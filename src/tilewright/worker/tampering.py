"""Detect functions of torch, the clock and Tilewright that an untrusted file has replaced in its process."""

from __future__ import annotations

import builtins
import contextlib
import gc
import random
import statistics
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.testing
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type)
CONSTANTS = (int, float, str, tuple)
# Operators with which results are copied and compared. A file may register its own for others.
OPERATORS = ("clone", "copy_", "detach", "empty_like", "empty.memory_format", "empty_strided", "equal")
# Entered and left around the calls.
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)

TORCH_FOLDER = str(Path(str(torch.__file__)).parent)


class FunctionSnapshot:
    """The functions as they are now, to be compared with later."""

    def __init__(self) -> None:
        self._known = [(owner, vars(owner), name, value, _code(value)) for owner, name, value in _guarded_names()]
        self._observers = _observers()

    def replaced(self) -> list[str]:
        found = [
            f"{owner.__name__}.{name}"
            for owner, names, name, value, code in self._known
            if not _is_unchanged(names.get(name), value, code)
        ]
        return [*found, *(name for name, value in _observers().items() if value != self._observers[name])]


def _observers() -> dict[str, Any]:
    """Return what runs at every call of Python or torch: it could compute an output when Tilewright looks at it."""
    # torch.set_default_device enters a DeviceContext.
    modes = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    return {
        "sys.settrace": sys.gettrace(),
        "sys.setprofile": sys.getprofile(),
        "sys.monitoring": [m.get_tool(n) for n in range(6)] if (m := getattr(sys, "monitoring", None)) else [],
        "torch's function modes": modes,
        "torch's dispatch modes": _get_current_dispatch_mode_stack(),
        "gc.callbacks": [*gc.callbacks],
        **{f"the operator aten::{name}": torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS},
    }


def _is_unchanged(now: Any, value: Any, code: Any) -> bool:
    if now is value:
        return _code(now) is code
    wraps = value is not None and getattr(now, "__wrapped__", None) is value  # importing torch._dynamo wraps a few
    return wraps and isinstance(now, types.FunctionType) and now.__code__.co_filename.startswith(TORCH_FOLDER)


def _guarded_names() -> Iterator[tuple[Any, str, Any]]:
    """Yield the names on which verdicts and times depend. A file may add names, but not change these."""
    ours = [m for name, m in sys.modules.items() if name.startswith("tilewright.")]
    of_torch = [torch, torch.Tensor, torch.testing, torch.nn.functional, torch.cuda, torch.cuda.Event]
    of_torch += [torch.cuda.Stream, torch.autograd, pytree]
    classes = [c for m in ours for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    for owner in [*of_torch, time, random, statistics, gc, contextlib, *ours, *classes]:
        for name, value in list(vars(owner).items()):
            special = name.startswith("__")
            if (
                (isinstance(value, KINDS) and not special)
                or (owner in classes and special and isinstance(value, types.FunctionType))
                or (owner in ours and name.isupper() and isinstance(value, CONSTANTS))
            ):
                yield owner, name, value
    yield from ((torch._C, name, value) for name, value in vars(torch._C).items() if name.startswith("_cuda_"))
    inherited = {name for base in torch.Tensor.__mro__[1:] for name in vars(base)} - set(vars(torch.Tensor))
    yield from ((torch.Tensor, name, None) for name in inherited)  # an attribute of Tensor would shadow these
    for context in CONTEXTS:
        yield from ((context, name, vars(context)[name]) for name in ("__enter__", "__exit__") if name in vars(context))
    for name, value in vars(builtins).items():
        if isinstance(value, KINDS):
            yield builtins, name, value


def _code(value: Any) -> Any:
    return getattr(value, "__code__", None)
