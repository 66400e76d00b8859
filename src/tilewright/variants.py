"""Other values for inputs that somebody else draws: the user's own, or those of a third-party problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.spec import FAR_BELOW

PROBLEM_VALUES = (
    *("random signs", "negated", "zeros", "scaled far up", FAR_BELOW),
    *("permuted", "scaled up", "scaled down"),
)
MIN_SORTED = 8  # elements in a row: fewer may be in order by chance
SCALES = {"negated": -1.0, "zeros": 0.0, "scaled up": 8.0, "scaled down": 2.0**-6, "scaled far up": 1024.0}


def vary(args: Sequence[Any], values: str, device: str, seed: int) -> list[Any]:
    """Return the arguments with one of PROBLEM_VALUES in the floating-point tensors that may get other values."""
    generator = torch.Generator(device).manual_seed(seed)
    return [_changed(a, values, generator) if may_change(a) else a for a in args]


def may_change(leaf: Any) -> bool:
    """Return whether a tensor may get other values: not if it is a mask, a label, a distribution, or sorted."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype.itemsize < 2 or not leaf.numel():
        return False
    values = leaf.double()
    low, high = values.min(), values.max()
    has_two_values = bool(((values == low) | (values == high)).all())
    is_distribution = leaf.dim() > 0 and bool(low >= 0 and ((values.sum(-1) - 1).abs() < 1e-3).all())
    return not has_two_values and not is_distribution and not is_sorted(values)


def is_symmetric(leaf: Tensor) -> bool:
    """Return whether a tensor holds symmetric matrices."""
    return leaf.dim() > 1 and leaf.shape[-1] == leaf.shape[-2] and torch.equal(leaf, leaf.mT)


def is_sorted(values: Tensor) -> bool:
    """Return whether every row is in order, and long enough that this is no chance."""
    if not values.dim() or values.shape[-1] < MIN_SORTED:
        return False
    for part in (values.reshape(-1, values.shape[-1])[:1], values):  # the first row decides for most tensors
        steps = part.diff()
        if not bool((steps >= 0).all() or (steps <= 0).all()):
            return False
    return True


def _changed(leaf: Tensor, values: str, generator: torch.Generator) -> Tensor:
    """Return other values of the same kind.

    Zeros stay where they are, as in a triangular matrix, and a symmetric matrix stays symmetric.
    """
    if values in SCALES:
        return leaf * SCALES[values]
    if values == FAR_BELOW:
        return torch.where(leaf == 0, leaf, -128 * (leaf.abs() + 1)).to(leaf.dtype)
    if is_symmetric(leaf):
        return leaf
    if values == "random signs":
        return leaf * (2 * torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device) - 1)
    permuted = leaf.clone()
    nonzero = leaf[leaf != 0]
    permuted[leaf != 0] = nonzero[torch.randperm(len(nonzero), generator=generator, device=leaf.device)]
    return permuted
