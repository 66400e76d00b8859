"""The call path of every public function: our kernel where it is eligible and wins, torch elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from tilewright.runtime.crossovers import Crossover, compiled_size

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16  # bytes: any vector access may start at such an address
STRIDED = torch.strided

TensorKey = tuple[torch.Size, torch.dtype, int]  # shape, dtype and GPU of a contiguous, aligned tensor
Plan = Callable[..., "Callable[..., Any] | None"]  # takes options and a TensorKey per tensor


class Dispatch:
    """The decision for one family of operations whether our kernels may take a call, and win.

    A call whose arguments alone decide what happens (contiguous, aligned tensors without autograd; nothing traces,
    casts or transforms the call) is looked up in `plan(options, *keys)`, which is cached and returns a function of the
    tensors, or None for torch. Every other call goes to `call(options, *tensors)`, which checks the tensors themselves
    and returns the result of a registered operator, or None for torch. Both launch from the same plans.
    """

    def __init__(self, plan: Plan, call: Callable[..., Any]):
        self._plan, self._call = plan, call

    def __call__(self, crossover: Crossover, options: Any, first: Any, *others: Any) -> Any:
        """Return the result of our kernel, or None where torch must compute it or wins.

        torch wins below the crossover, where it takes less time than our call costs the host, or than our kernel takes
        where host time does not count. The checks are written out here, since a function call for each would be a large
        part of that cost. For the same reason `options` is a plain tuple.
        """
        if not isinstance(first, Tensor):
            return None
        device, size = first.get_device(), first.numel()
        if is_compiling := torch.compiler.is_compiling():
            if size < compiled_size(crossover.name, device):
                return None
        elif (size < crossover[device] or size < crossover.captured[device]) and size < crossover.limit(device):
            return None
        kind = type(first)
        if (
            (first.requires_grad and is_grad_enabled())
            or is_compiling
            or _len_torch_dispatch_stack()
            or _is_any_autocast_enabled()
            or _are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or not (kind is Tensor or kind is Parameter)
            or first.layout is not STRIDED
            or first.is_nested
            or not (first.is_cuda or is_interpreted(first))
            or not first.is_contiguous()
            or first.data_ptr() % ALIGNMENT
        ):
            return self._call(options, first, *others)
        key = first.shape, first.dtype, device
        if not others:
            launch = self._plan(options, key)
            return launch and launch(first)
        keys: list[TensorKey | None] = [key]
        for tensor in others:
            if tensor is None:
                keys.append(None)
                continue
            kind = type(tensor)
            if (
                not (kind is Tensor or kind is Parameter)
                or (tensor.requires_grad and is_grad_enabled())
                or tensor.layout is not STRIDED
                or tensor.is_nested
                or not (tensor.is_cuda or is_interpreted(tensor))
                or not tensor.is_contiguous()
                or tensor.data_ptr() % ALIGNMENT
            ):
                return self._call(options, first, *others)
            keys.append((tensor.shape, tensor.dtype, tensor.get_device()))
        launch = self._plan(options, *keys)
        return launch and launch(first, *others)


def eligible(first: Any, *others: Any) -> bool:
    """Return whether our kernels can take these tensors as torch would: floats of one dtype on one GPU, or interpreted.

    Autocast, forward-mode and functional transforms and tensor subclasses go to torch.
    """
    if not _is_plain(first) or (dtype := first.dtype) not in FLOATS:
        return False
    if not first.is_cuda and not is_interpreted(first):
        return False
    device = first.device
    for other in others:
        if not _is_plain(other) or other.dtype != dtype or other.device != device:
            return False
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return False
    return not _are_functorch_transforms_active() and forward_ad._current_level < 0


def why_not_eligible(first: Any, *others: Any) -> str | None:
    """Return in words why `eligible` is false; None if it is true."""
    for tensor in (first, *others):
        if not isinstance(tensor, Tensor):
            return f"an argument is of type {type(tensor).__name__}, not a tensor"
        if type(tensor) not in (Tensor, Parameter):
            return f"{type(tensor).__name__} is a subclass of Tensor"
        if not _is_plain(tensor):
            return "a tensor is sparse or nested"
    if first.dtype not in FLOATS:
        return f"the dtype is {str(first.dtype).removeprefix('torch.')}"
    if not first.is_cuda and not is_interpreted(first):
        return f"the tensor is on {first.device.type}"
    if any(other.dtype != first.dtype for other in others):
        return "the tensors have different dtypes"
    if any(other.device != first.device for other in others):
        return "the tensors are on different devices"
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(first.device.type):
        return "autocast is enabled"
    if _are_functorch_transforms_active():
        return "a functional transform is active"
    return "forward-mode differentiation is active" if forward_ad._current_level >= 0 else None


def is_interpreting() -> bool:
    """Return whether kernels run on CPU tensors, inside `tilewright.interpret()`."""
    return getattr(JITFunction.run, "takes_cpu_tensors", False)


def is_interpreted(tensor: Tensor) -> bool:
    """Return whether kernels run on this CPU tensor."""
    return tensor.device.type == "cpu" and is_interpreting()


def has_elements(shape: Sequence[int], dtype: torch.dtype, dim: int) -> bool:
    """Return whether a tensor has elements, a dtype that our kernels take, and that dimension."""
    return dtype in FLOATS and math.prod(shape) > 0 and -len(shape) <= dim < len(shape)


def empty_like_options(shape: Sequence[int]) -> dict[str, Any]:
    """Return the options of `torch.empty_like` that give a tensor of this shape the strides of torch's own result.

    The stride of a dimension of size 1 can be anything, and `empty_like` would copy it. Otherwise no option is cheaper.
    """
    return {"memory_format": torch.contiguous_format} if 1 in shape else {}


def unary(launch: Callable[[Tensor, Tensor], None], shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return the function from a tensor of this shape to a new one that a launch fills."""
    options = empty_like_options(shape)

    def run(x: Tensor) -> Tensor:
        y = torch.empty_like(x, **options)
        launch(x, y)
        return y

    return run


def _is_plain(tensor: Any) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_nested
