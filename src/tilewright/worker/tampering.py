"""What a stranger's file has replaced in the process that runs it: functions of torch, of the clock, and of ours."""

from __future__ import annotations

import builtins
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.testing

KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)

TORCH = str(Path(torch.__file__).parent)  # importing torch._dynamo wraps a few functions of torch


class Fingerprint:
    """Functions as they are now; later, which of them are others."""

    def __init__(self) -> None:
        self._known = [(owner, name, value, _code(value)) for owner, name, value in _functions()]

    def replaced(self) -> list[str]:
        return [
            f"{getattr(owner, '__name__', owner)}.{name}"
            for owner, name, value, code in self._known
            if not _is_still(vars(owner).get(name), value, code)
        ]


def _is_still(now: Any, value: Any, code: Any) -> bool:
    wrapped_by_torch = getattr(now, "__wrapped__", None) is value and _code(now).co_filename.startswith(TORCH)
    return wrapped_by_torch or (now is value and _code(now) is code)


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """Of the modules on which verdicts and times depend. New names may come; known ones must stay what they are."""
    ours = [m for name, m in sys.modules.items() if name.startswith("tilewright.")]
    torchs = [torch, torch.Tensor, torch.testing, torch.nn.functional, torch.cuda, torch.cuda.Event, torch.cuda.Stream]
    classes = [c for m in ours for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    for owner in [*torchs, torch.autograd, time, *ours, *classes]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, KINDS) and not name.startswith("__"):
                yield owner, name, value
    for name in ("open", "print", "isinstance", "type", "len", "max", "min", "sum", "abs", "all", "any", "id"):
        yield builtins, name, getattr(builtins, name)


def _code(value: Any) -> Any:
    return getattr(value, "__code__", None)
