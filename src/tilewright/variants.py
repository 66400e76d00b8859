"""Other values for inputs that somebody else draws: the user's own, or those of a third-party problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PROBLEM_VALUES = ("random signs", "negated", "zeros", "permuted", "scaled up", "scaled down")
SCALES = {"negated": -1.0, "zeros": 0.0, "scaled up": 8.0, "scaled down": 2.0**-6}


def vary(args: Sequence[Any], values: str, device: str, seed: int) -> list[Any]:
    """Return the arguments with one of PROBLEM_VALUES in the floating-point tensors that may get other values."""
    generator = torch.Generator(device).manual_seed(seed)
    return [_changed(a, values, generator) if _is_varied(a) else a for a in args]


def _is_varied(leaf: Any) -> bool:
    """Return whether a leaf may get other values: not if it is a mask, a label or a probability distribution."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype.itemsize < 2 or not leaf.numel():
        return False
    values = leaf.double()
    low, high = values.min(), values.max()
    has_two_values = bool(((values == low) | (values == high)).all())
    is_distribution = leaf.dim() > 0 and bool(low >= 0 and ((values.sum(-1) - 1).abs() < 1e-3).all())
    return not has_two_values and not is_distribution


def _changed(leaf: Tensor, values: str, generator: torch.Generator) -> Tensor:
    """Return other values of the same kind.

    Zeros stay where they are, as in a triangular matrix, and a symmetric matrix stays symmetric.
    """
    if values in SCALES:
        return leaf * SCALES[values]
    if leaf.dim() > 1 and leaf.shape[-1] == leaf.shape[-2] and torch.equal(leaf, leaf.mT):
        return leaf
    if values == "random signs":
        return leaf * (2 * torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device) - 1)
    permuted = leaf.clone()
    nonzero = leaf[leaf != 0]
    permuted[leaf != 0] = nonzero[torch.randperm(len(nonzero), generator=generator, device=leaf.device)]
    return permuted
