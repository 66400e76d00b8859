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
from torch.utils import _pytree as pytree

KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type)
CONSTANTS = (int, float, str, tuple)

TORCH_FOLDER = str(Path(str(torch.__file__)).parent)


class FunctionSnapshot:
    """The functions as they are now, to be compared with later."""

    def __init__(self) -> None:
        self._known = [(owner, vars(owner), name, value, _code(value)) for owner, name, value in _guarded_names()]

    def replaced(self) -> list[str]:
        return [
            f"{owner.__name__}.{name}"
            for owner, names, name, value, code in self._known
            if not _is_unchanged(names.get(name), value, code)
        ]


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
    for name in ("open", "print", "isinstance", "type", "len", "max", "min", "sum", "abs", "all", "any", "id"):
        yield builtins, name, getattr(builtins, name)


def _code(value: Any) -> Any:
    return getattr(value, "__code__", None)
