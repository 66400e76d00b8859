"""Run code that names the device "cuda" on a machine without a GPU: its tensors are created on another device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _RedirectCuda(TorchFunctionMode):
    def __init__(self, device: str):
        super().__init__()
        self._device = torch.device(device)
        self._names = ("cuda", "cpu") if device == "meta" else ("cuda",)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or (func is torch.Tensor.cpu and self._device.type == "meta"):
            return args[0].to(self._device)
        if func == _IS_CUDA:  # torch makes a new wrapper for every call
            return True
        if "device" in kwargs:
            kwargs["device"] = self._redirect(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(self._redirect(a) for a in args)
        return func(*args, **kwargs)

    def _redirect(self, value: Any) -> Any:
        if isinstance(value, str | torch.device) and str(value).startswith(self._names):
            return self._device
        return value


_RealGenerator = torch.Generator


class _CpuGenerator(_RealGenerator):  # a subclass, since torch checks the type
    def __new__(cls, device: Any = "cpu") -> Any:
        return _RealGenerator.__new__(cls, "cpu")  # type: ignore[call-arg]


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@contextlib.contextmanager
def redirect_cuda(device: str) -> Iterator[None]:
    """Make "cuda" mean `device`, unless that is "cuda" itself; with "meta", create every tensor there."""
    if device == "cuda":
        yield
        return
    torch.Generator = _CpuGenerator  # type: ignore[misc]
    try:
        with _RedirectCuda(device), torch.device(device) if device == "meta" else contextlib.nullcontext():
            yield
    finally:
        torch.Generator = _RealGenerator  # type: ignore[misc]
