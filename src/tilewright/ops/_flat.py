"""What the operations on plain runs of memory share: when a call may leave torch's own path for ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops._dispatch import runs_here


def takes(smallest: int, *tensors: Any) -> bool:
    """Whether our kernels can take these as torch would: tensors of one shape, each a run of memory without gaps."""
    first = tensors[0]
    return (
        isinstance(first, Tensor)
        and first.numel() >= smallest
        and all(isinstance(t, Tensor) and _without_gaps(t) and t.shape == first.shape for t in tensors)
        and runs_here(*tensors)
    )


def _without_gaps(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.is_contiguous()
