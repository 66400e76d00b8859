"""The precision of fp8 tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

SUMS_OF_13_BITS = ((8, 9), (9, 0))  # compute capabilities


def keeps_13_bits(device: int) -> bool:
    """Return whether fp8 tensor cores align the terms of a sum to the largest and keep 13 bits of each.

    So do Ada's and Hopper's. DeepSeek-V3's technical report (arXiv 2412.19437, section 3.5.2) measured about 14 bits on
    an H800. Interpreted kernels run the code for such GPUs.
    """
    return device < 0 or (torch.version.hip is None and torch.cuda.get_device_capability(device) in SUMS_OF_13_BITS)


def precision_of_sums(x: Tensor) -> float:
    """Return the relative precision of fp8 sums on the GPU of x; 0 where they are as precise as fp32."""
    return 2.0**-13 if x.is_cuda and keeps_13_bits(x.get_device()) else 0.0
