"""Options and formula of the cross entropies, and which calls their kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.runtime.crossovers import Crossover
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.launch import MAX_INT32

IGNORE_INDEX = -100  # torch's default
REDUCTIONS = ("none", "mean", "sum")


class CrossEntropy(NamedTuple):
    """The options of a call."""

    ignore_index: int = IGNORE_INDEX
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    form: str = "best"  # triton, or the faster one of Triton and CUDA C++
    is_wide: bool = False  # the loss is fp32, whatever the dtype of the logits

    @property
    def is_scalar(self) -> bool:
        """Return whether the loss is one number rather than one per row."""
        return self.reduction != "none"

    def validate(self) -> None:
        """Raise for the options that torch does not have and therefore does not check."""
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, not {self.softcap}")
        if not isinstance(self.z_loss, (int, float)):
            raise TypeError(f"z_loss must be a number, not {type(self.z_loss).__name__}")

    def with_floats(self) -> CrossEntropy:
        """Return the same with floats where ints were given, for which Triton would compile other kernels."""
        softcap = None if self.softcap is None else float(self.softcap)
        return self._replace(label_smoothing=float(self.label_smoothing), z_loss=float(self.z_loss), softcap=softcap)

    def loss_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the loss of logits of a dtype."""
        return torch.float32 if self.is_wide else dtype


def torch_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy) -> Tensor:
    """Cross entropy of soft-capped logits by torch, plus the z-loss."""
    cap, reduction = options.softcap, options.reduction
    logits = logits.float() if options.is_wide else logits
    z = logits if cap is None else cap * torch.tanh(logits / cap)
    given = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    loss = torch.nn.functional.cross_entropy(z, target, weight, reduction=reduction, **given)
    if not options.z_loss:
        return loss
    squares = options.z_loss * torch.logsumexp(z, min(1, z.dim() - 1)).square()
    if target.is_floating_point():
        return loss + (squares if reduction == "none" else squares.sum() if reduction == "sum" else squares.mean())
    ignored = target == options.ignore_index
    squares = squares.masked_fill(ignored, 0)
    if reduction == "none":
        return loss + squares
    if reduction == "sum":
        return loss + squares.sum()
    weights = torch.ones_like(squares) if weight is None else weight[target.masked_fill(ignored, 0)]
    return loss + squares.sum() / weights.masked_fill(ignored, 0).sum()


def eligible_loss(
    crossover: Crossover,
    shape: torch.Size,
    floats: Sequence[Tensor],
    target: Any,
    weight: Any,
    options: CrossEntropy,
) -> bool:
    """Return whether our kernels can take logits of this shape, computed from `floats`, as torch would.

    The logits are rows of classes, with a class index or probabilities for each row.
    """
    if not isinstance(target, Tensor) or len(shape) not in (1, 2):
        return False
    device, size = floats[0].get_device(), shape.numel()
    if not crossover.reached(size, device):
        return False
    if not size or shape[-1] > MAX_INT32:
        return False
    floats = [*floats]
    if target.dtype == torch.int64:
        fits = target.shape == shape[:-1] and target.device == floats[0].device and type(target) is Tensor
    else:
        fits = target.shape == shape and not target.requires_grad
        floats.append(target)
    if weight is not None:
        fits = fits and isinstance(weight, Tensor) and weight.shape == shape[-1:] and not weight.requires_grad
        floats.append(weight)
    fits = fits and options.reduction in REDUCTIONS and isinstance(options.ignore_index, int)
    return fits and 0 <= options.label_smoothing <= 1 and eligible(*floats)
