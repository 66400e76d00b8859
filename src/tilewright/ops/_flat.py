"""What the operations on plain runs of memory share: when a call may leave torch's own path for ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.ops._dispatch import runs_here


def takes(smallest: float, *tensors: Any) -> bool:
    """Whether our kernels can take these as torch would: tensors of one shape, each a run of memory without gaps."""
    first = tensors[0]
    return (
        isinstance(first, Tensor)
        and first.numel() >= smallest
        and all(isinstance(t, Tensor) for t in tensors)
        and runs_here(*tensors)
        and all(t.is_contiguous() and t.shape == first.shape for t in tensors)
    )
