"""Outputs with steps: a comparison, a rounding or a cast to an integer turns a rounding error into a jump.

An element near a step may lie on either side of it. That must not loosen the budgets of other elements, as the large
error of one element otherwise does for all of its magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.workbench.check.elements import as_rows, finite, row_maximum, tiles, ulp

WIDE = 16  # fp32 roundings by which inputs are perturbed, to find the elements near a step
# An element jumps if one rounding changes it by more than this many times what it does to most elements, and by more
# than SMALLEST and two roundings of its dtype; all relative to the maximum of its row.
OUTLIER, MOST, SMALLEST = 64.0, 0.9, 2.0**-18
FEW_INTEGERS = 100  # one integer in this many may be near a step by chance
SAMPLE = 2**16  # elements from which the usual change is estimated
OPERATORS = {
    "round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide", "fmod", "remainder", "frac",
    "bucketize", "searchsorted", "histc", "gt", "ge", "lt", "le",
}  # fmt: skip


class Steps:
    """The elements of an output that are near a step, and by how much each may be off for it.

    A result that is an integer may be off by one at a step: a larger change is another maximum, not a step. Where many
    integers are at a step, they were rounded from exact ties, for which rounding has a rule. `is_exact` says the same
    of floats: they are integers, rounded from numbers that are exact in any precision.
    """

    def __init__(self, truth: Tensor, dtype: torch.dtype, is_exact: bool = False):
        self._dtype, self._is_integer = dtype, not dtype.is_floating_point
        self._truth = as_rows(truth)
        self._shape = truth.shape
        self._row = row_maximum(self._truth)
        self._least = 0.0 if self._is_integer else max(SMALLEST, 2 * torch.finfo(dtype).eps)
        self._may_be_ties = self._is_integer or is_exact
        self._smooth = 0.0  # the largest change of an element that does not jump, relative to its row
        self.allowed: Tensor | None = None

    def take(self, error: Tensor, sensitivity: Tensor) -> None:
        """Take the jumps out of torch's error and of the changes by one rounding, which both become zero there."""
        if not self._truth.numel():
            return
        errors, sensitivities = as_rows(error), as_rows(sensitivity)
        limit = self._least if self._may_be_ties else max(self._least, OUTLIER * self._usual(errors, sensitivities))
        for at in tiles(*self._truth.shape):
            change = self._change(errors[at], sensitivities[at], at)
            relative = change / self._row[at[0]]
            jumps = relative > limit
            self._smooth = max(self._smooth, float(relative.masked_fill_(jumps, 0.0).max()))
            if bool(jumps.any()):
                self._allow(change, jumps, at)
                errors[at] = errors[at].masked_fill(jumps, 0.0)
                sensitivities[at] = sensitivities[at].masked_fill(jumps, 0.0)

    def widen(self, change: Tensor, roundings: float) -> None:
        """Allow the steps that inputs cross which are perturbed by this many fp32 roundings."""
        changes, limit = as_rows(change), max(self._least, 2 * roundings * self._smooth)
        for at in tiles(*self._truth.shape) if self._truth.numel() else ():
            found = finite(changes[at])
            self._allow(found, found / self._row[at[0]] > limit, at)

    def add_to(self, budget: Tensor) -> Tensor:
        if self.allowed is None:
            return budget
        at_steps, few = int((self.allowed > 0).sum()), max(1, budget.numel() // FEW_INTEGERS)
        return budget if self._may_be_ties and at_steps > few else budget + self.allowed.reshape(self._shape)

    def _change(self, error: Tensor, sensitivity: Tensor, at: tuple[slice, slice]) -> Tensor:
        if self._is_integer:
            return torch.maximum(error, sensitivity)
        beyond = error - ulp(finite(self._truth[at]).abs(), self._dtype) / 2
        return finite(torch.maximum(beyond, sensitivity))

    def _usual(self, errors: Tensor, sensitivities: Tensor) -> float:
        """Return a change, relative to its row, that most elements do not exceed."""
        step = max(1, self._truth.numel() // SAMPLE)
        flat = torch.arange(0, self._truth.numel(), step, device=self._truth.device)
        at = (flat // self._truth.shape[1], flat % self._truth.shape[1])
        change = self._change(errors[at], sensitivities[at], at) / self._row[at[0], 0]  # type: ignore[arg-type,index]
        return float(change.kthvalue(max(1, int(MOST * len(change))))[0])

    def _allow(self, change: Tensor, where: Tensor, at: tuple[slice, slice]) -> None:
        where = where & (change <= 1) if self._is_integer else where
        if bool(where.any()):
            if self.allowed is None:
                self.allowed = torch.zeros_like(self._truth, dtype=torch.float64)
            self.allowed[at] = torch.maximum(self.allowed[at], torch.where(where, change, 0.0))
