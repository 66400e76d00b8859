"""Liger: Triton kernels for training language models."""

from __future__ import annotations

from torch import Tensor

PACKAGE = "liger_kernel"
INSTALL = "liger-kernel"
LONGEST_ROW = 65536  # elements: longer ones need a block that Liger refuses


def softmax(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def fits_softmax(x: Tensor) -> bool:
    return 0 < x.shape[-1] <= LONGEST_ROW and x.numel() > 0
