"""The TF32 settings of torch: whether fp32 matrix products and convolutions may round their inputs on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Tf32(NamedTuple):
    matmul: bool = False
    cudnn: bool = False  # torch's default is True


def current() -> Tf32:
    """Return what torch's settings allow, through whichever of its interfaces they were made."""
    if getattr(torch.backends, "fp32_precision", None) == "tf32":
        return Tf32(matmul=True, cudnn=True)
    try:
        return Tf32(bool(torch.backends.cuda.matmul.allow_tf32), bool(torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # the newer interface was used, and the older one refuses to answer
        cudnn = torch.backends.cudnn
        convolution, rnn = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision  # type: ignore[attr-defined]
        product = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
        return Tf32(product == "tf32", "tf32" in (convolution, rnn))


def allow(what: Tf32) -> None:
    if getattr(torch.backends, "fp32_precision", None) == "tf32":
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = what


@contextlib.contextmanager
def allowed(what: Tf32) -> Iterator[None]:
    before = current()
    allow(what)
    try:
        yield
    finally:
        allow(before)
