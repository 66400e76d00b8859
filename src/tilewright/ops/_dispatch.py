"""When a call may leave torch's own path for ours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_nested
