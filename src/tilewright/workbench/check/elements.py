"""Large tensors element by element: pieces whose float64 copies are small, and the rounding of a dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 2**26  # elements at a time, to bound the memory of large outputs


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor into pieces whose float64 copies are small."""
    return tensor.reshape(-1).split(CHUNK)


def tiles(rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Split [rows, columns] into tiles of at most CHUNK elements."""
    width = max(1, min(columns, CHUNK))
    height = max(1, CHUNK // width)
    return [
        (slice(i, i + height), slice(j, j + width)) for i in range(0, rows, height) for j in range(0, columns, width)
    ]


def as_rows(tensor: Tensor) -> Tensor:
    """Return a view, or a copy, with two dimensions: the last one, and all others."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    return tensor.reshape(tensor.numel() // max(1, columns), columns)


def row_maximum(rows: Tensor) -> Tensor:
    """Return the largest finite magnitude in each row [rows, 1], or 1 where all are zero."""
    found = rows.new_zeros(len(rows), 1, dtype=torch.float64)
    for at in tiles(*rows.shape):
        found[at[0]] = torch.maximum(found[at[0]], finite(rows[at].double()).abs().amax(dim=1, keepdim=True))
    return torch.where(found > 0, found, 1.0)


def finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gap between neighbouring values of the dtype at this magnitude."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(magnitude.clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps
