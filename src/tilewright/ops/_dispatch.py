"""When a call may leave torch's own path for ours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from triton.runtime.jit import JITFunction

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def runs_here(*tensors: Tensor) -> bool:
    """Whether our kernels can take these tensors as torch would: floats of one dtype on one GPU (or interpreted).

    What only torch can do goes to torch: autocast's casts, forward-mode and functional transforms, tensor subclasses.
    """
    first = tensors[0]
    return (
        (first.is_cuda or (first.device.type == "cpu" and getattr(JITFunction.run, "takes_cpu_tensors", False)))
        and first.dtype in FLOATS
        and all(_plain(t) and t.dtype == first.dtype and t.device == first.device for t in tensors)
        and not torch.is_autocast_enabled(first.device.type)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _plain(tensor: Tensor) -> bool:
    is_subclass = type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter
    return tensor.layout == torch.strided and not is_subclass and not tensor.is_nested
