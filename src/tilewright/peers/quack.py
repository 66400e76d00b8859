"""quack: CuTe DSL kernels that hold long rows in clusters of thread blocks."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PACKAGE = "quack"
INSTALL = "quack-kernels"
LANGUAGE = "cuda"  # it needs a GPU, as CUDA C++ does
# The backward of layer_norm is missing, and that of cross_entropy rejects the gradient of a mean or a sum.
WITHOUT_GRADIENT = ("layer_norm", "cross_entropy")
VECTOR = 16  # bytes of an access
LONGEST_ROW = 262144  # elements; longer ones exceed the shared memory of the largest cluster


def _quack(module: str) -> Any:
    """Return a module of the library, which a plain import would confuse with this file for static checkers."""
    return importlib.import_module(f"{PACKAGE}.{module}")


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile to quack's cache on disk what calls on fake tensors would launch."""
    cache_utils = _quack("cache_utils")
    cache_utils.COMPILE_ONLY = True
    try:
        yield
    finally:
        cache_utils.COMPILE_ONLY = False


def softmax(x: Tensor) -> Tensor:
    return _quack("softmax").softmax(x)


def fits_softmax(x: Tensor) -> bool:
    return _takes_rows(x)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return _quack("rmsnorm").rmsnorm(x, weight, eps=eps)


def fits_rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> bool:
    return weight_offset == 0 and _takes_rows(x) and _takes_vectors(x, weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    return _quack("rmsnorm").rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


def fits_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> bool:
    is_alike = residual.dtype == x.dtype and _takes_rows(residual)
    return is_alike and fits_rms_norm(x, weight, eps, weight_offset)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _quack("rmsnorm").layernorm_fwd(x, weight, bias, eps=1e-5)


def fits_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    is_wide = weight is not None and weight.dtype == torch.float32
    return is_wide and _takes_rows(x) and _takes_vectors(x, weight, bias)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """quack's loss is always fp32."""
    loss = _quack("cross_entropy").cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction)
    return loss.to(x.dtype)


def fits_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> bool:
    is_plain = weight is None and softcap is None and not (label_smoothing or z_loss)
    return is_plain and target.is_contiguous() and _takes_rows(x)


def _takes_rows(x: Tensor) -> bool:
    """Return whether rows start at multiples of the vector width, as far as their length is one."""
    if x.dim() != 2 or x.numel() == 0 or x.shape[1] > LONGEST_ROW or x.stride(1) != 1:
        return False
    width = math.gcd(VECTOR // x.itemsize, x.shape[1])
    return x.stride(0) % width == 0 and x.storage_offset() % width == 0


def _takes_vectors(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether parameters of a row's length start at multiples of the vector width."""
    width = math.gcd(VECTOR // x.itemsize, x.shape[-1])
    return all(p is None or (p.stride(0) == 1 and p.storage_offset() % width == 0) for p in parameters)
