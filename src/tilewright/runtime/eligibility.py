"""When a call may leave torch's own path for ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from tilewright.runtime.operator import contiguous_like

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALIGNED = 16  # bytes: on such an address any access may begin


def runs_here(first: Tensor, *others: Tensor) -> bool:
    """Whether our kernels can take these tensors as torch would: floats of one dtype on one GPU (or interpreted).

    What only torch can do goes to torch: autocast's casts, forward-mode and functional transforms, tensor subclasses.
    """
    dtype = first.dtype
    if not _is_plain(first) or dtype not in FLOATS:
        return False
    if not first.is_cuda and not (first.device.type == "cpu" and getattr(JITFunction.run, "takes_cpu_tensors", False)):
        return False
    if others:
        device = first.device
        for other in others:
            if not _is_plain(other) or other.dtype != dtype or other.device != device:
                return False
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(first.device.type):
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def is_quiet() -> bool:
    """Whether a call's arguments alone settle what it does: nothing traces, casts or transforms it, or listens."""
    return not (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _is_any_autocast_enabled()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_ready(x: Any) -> bool:
    """Whether our kernels can take a tensor in a quiet call as it lies in memory, without a thought of gradients. Then
    its shape, dtype and device settle the rest, which need not be settled again."""
    return (
        _is_plain(x)
        and (x.is_cuda or is_interpreted(x))
        and not (x.requires_grad and torch.is_grad_enabled())
        and x.is_contiguous()
        and x.data_ptr() % ALIGNED == 0
    )


def has_elements(shape: Sequence[int], dtype: torch.dtype, dim: int) -> bool:
    """Whether there are elements, of a type that our kernels take, and that dimension."""
    return dtype in FLOATS and math.prod(shape) > 0 and -len(shape) <= dim < len(shape)


def has_at_least(smallest: float, x: Any) -> bool:
    """Whether x is a tensor of so many elements: what is smaller goes to torch without another thought."""
    return isinstance(x, Tensor) and x.numel() >= smallest


def empty_like(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """What makes an empty tensor like one of this shape that `is_ready`, with the strides that torch would give it. At
    the least cost: those of a dimension of one element alone can be anything."""
    # Asked for at each call: whoever watches memory puts another function there for a while.
    return contiguous_like if 1 in shape else lambda x: torch.empty_like(x)


def filling(launch: Callable[[Tensor, Tensor], None], shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Of a launch that reads a tensor of this shape and writes another like it: the function from one to the other."""
    make = empty_like(shape)

    def run(x: Tensor) -> Tensor:
        y = make(x)
        launch(x, y)
        return y

    return run


def is_interpreted(tensor: Tensor) -> bool:
    """Whether kernels take it where there is no GPU."""
    return tensor.device.type == "cpu" and getattr(JITFunction.run, "takes_cpu_tensors", False)


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_nested
