"""The reference of a problem with every float widened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)  # fp8 is a quantisation, which is part of the operation


class _Widen(TorchFunctionMode):
    """Turns casts to a narrower float into casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        named = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._wide, args), **named)

    @staticmethod
    def _wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 also where a reference casts to a narrower float or creates tensors of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)
