"""Run host code as if a GPU were present: meta tensors that report its device, and faked device properties.

Nothing is allocated or launched. A function called in `fake_gpu(gpu)` takes the path it would take on that GPU, as far
as sizes, dtypes and device properties decide it. Reading a value of a tensor raises, unless `reads` provides one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from tilewright.driver import cuda_queries, device_properties, target
from tilewright.hardware import DATASHEETS, GPU

META = torch.device("meta")
# The functions by which the host reads values of a tensor.
READS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(torch.equal, torch.allclose, torch.is_nonzero),
}
Reads = Callable[[Any, tuple[Any, ...]], Any]  # a function of READS and its arguments, to the value that it returns
FIRST_INDEX = 64  # above the indices of real GPUs, so that per-device caches never mix them up
_INDICES = {name: FIRST_INDEX + n for n, name in enumerate(DATASHEETS)}


@contextmanager
def fake_gpu(gpu: GPU, reads: Reads | None = None, computed: list[str] | None = None) -> Iterator[torch.device]:
    """Make `gpu` the only GPU. Its tensors are meta tensors; `reads` returns the values that the host reads.

    Torch functions that would launch a kernel are appended to `computed`.
    """
    with fake_cuda_queries(gpu) as device, ExitStack() as stack:
        on_gpu = partial(_OnGPU, device, reads, computed)
        stack.enter_context(patch.object(CustomOpDef, "__call__", _custom_op_call(on_gpu)))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", _backward(on_gpu)))
        stack.enter_context(exit_raises())
        stack.enter_context(on_gpu())
        yield device


@contextmanager
def fake_cuda_queries(gpu: GPU, *others: Any) -> Iterator[torch.device]:
    """Make torch.cuda, and functions of the same name in `others`, describe `gpu`."""
    device = torch.device("cuda", _INDICES[gpu.name])
    with ExitStack() as stack:
        present = {"is_available": lambda: True, "device_count": lambda: 1}
        for name, query in (cuda_queries(gpu, device.index) | present).items():
            stack.enter_context(patch.object(torch.cuda, name, query))
            for other in others:
                if hasattr(other, name):
                    stack.enter_context(patch.object(other, name, staticmethod(query)))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True))
        stack.enter_context(patch.object(torch.version, "hip", "fake" if gpu.is_amd else None))
        stack.enter_context(patch.object(driver, "_active", _driver(gpu, device)))
        yield device


class _OnGPU(TorchFunctionMode):
    """Let meta tensors report the GPU as their device, and create meta tensors for that device."""

    def __init__(self, device: torch.device, reads: Reads | None, computed: list[str] | None):
        super().__init__()
        self._reads = reads
        self._computed = computed
        properties = {Tensor.is_cuda: True, Tensor.device: device}
        self._faked = {name.__get__: value for name, value in properties.items()} | {Tensor.get_device: device.index}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._faked and args[0].is_meta:
            return self._faked[func]
        if func in READS and args[0].is_meta and self._reads is not None:
            return self._reads(func, args)
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            return args[0].to(META)
        if kwargs.get("device") is not None:
            kwargs["device"] = _real_device(kwargs["device"])
        args = tuple(_real_device(a) if isinstance(a, torch.device | str) else a for a in args)
        try:
            returned = func(*args, **kwargs)
        except Exception:
            self._note(func, (args, kwargs))  # it needs values, and would launch something
            raise
        if _computes(func, (args, kwargs), returned):
            self._note(func, (args, kwargs))
        return returned

    def _note(self, func: Any, given: Any) -> None:
        if self._computed is not None:
            self._computed.append(_described(func, given))


def _computes(func: Any, given: Any, returned: Any) -> bool:
    """Return whether a torch function would launch a kernel; an allocation or a view would not."""
    name = getattr(func, "__name__", "")
    if returned is None:  # in place
        return _holds_tensors(given)
    if "empty" in name or not _holds_tensors(returned):
        return False
    storages = {one.untyped_storage()._cdata for one in tree_leaves(given) if isinstance(one, Tensor)}
    is_view = all(one.untyped_storage()._cdata in storages for one in tree_leaves(returned) if isinstance(one, Tensor))
    return not is_view or name.endswith("_")


def _holds_tensors(values: Any) -> bool:
    return any(isinstance(one, Tensor) for one in tree_leaves(values))


def _described(func: Any, given: Any) -> str:
    """Return the function and its arguments as text, tensors as dtype, shape and strides."""

    def describe(one: Any) -> str:
        if isinstance(one, Tensor):
            return f"{one.dtype} {[*one.shape]} {[*one.stride()]}"
        return "device" if isinstance(one, torch.device) else repr(one)

    return f"{getattr(func, '__name__', func)} {[describe(one) for one in tree_leaves(given)]}"


@contextmanager
def exit_raises() -> Iterator[None]:
    """Make `os._exit` raise in this process, because a user's file may call it; child processes exit."""
    here, leave = os.getpid(), os._exit

    def leave_or_raise(status: int) -> None:
        if os.getpid() != here:
            leave(status)
        raise SystemExit(f"it calls os._exit({status})")

    with patch.object(os, "_exit", leave_or_raise):
        yield


def _custom_op_call(on_gpu: Callable[[], _OnGPU]) -> Any:
    """Return a `CustomOpDef.__call__` that runs the implementation; for meta tensors torch would run the fake."""

    def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with on_gpu():  # torch disables the mode inside operators
                return operator._init_fn(*args, **kwargs)

        with patch.object(operator, "_abstract_fn", run):
            return operator._opoverload(*args, **kwargs)

    return call


def _backward(on_gpu: Callable[[], _OnGPU]) -> Any:
    run_backward = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with on_gpu():
            return run_backward(*args, **kwargs)

    return run


def _real_device(device: Any) -> Any:
    """Return the device on which a tensor for `device` is created."""
    is_gpu = isinstance(device, int) or str(device).partition(":")[0] == "cuda"
    return META if is_gpu else device


def _driver(gpu: GPU, device: torch.device) -> Any:
    """Return a fake Triton driver with what launchers use."""
    return SimpleNamespace(
        get_current_target=lambda: target(gpu),
        get_current_device=lambda: device.index,
        get_active_torch_device=lambda: device,
        get_device_interface=lambda: torch.cuda,
        get_current_stream=lambda *_: 0,
        utils=SimpleNamespace(get_device_properties=lambda *_: device_properties(gpu)),
    )
