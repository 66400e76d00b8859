"""Rotary embedding in attention layers that call a function `apply_rotary_pos_emb(q, k, cos, sin)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.probe import agree, is_plain, random
from tilewright.models.rebound import Rebound, called_global
from tilewright.models.replacements import Replacement
from tilewright.ops.rope import rope

FUNCTION = "apply_rotary_pos_emb"


def _ours(original: Any) -> Any:
    return partial(rotate, original=original)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, original: Any) -> Any:
    """Rotate q and k [B, heads, S, D] by angles [B, S, 2R], whose second half repeats the first."""
    if unsqueeze_dim != 1 or not _takes(q, k, cos, sin):
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    (B, _, S, _), pairs = q.shape, cos.shape[-1] // 2
    positions = None
    if cos.shape[0] > 1:
        positions = torch.arange(B * S, device=q.device).view(B, S)
    cos, sin = (table[..., :pairs].reshape(-1, pairs) for table in (cos, sin))
    return rope(q, k, cos, sin, positions, seq_dim=2)


def _takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        is_plain(q, k, cos, sin)
        and q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[2] == k.shape[2]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
    )


def find(module: nn.Module) -> Replacement | str | None:
    theirs = called_global(module, FUNCTION)
    if theirs is None:
        return None
    for batch in (1, 2):
        if not _rotates_halves(theirs, batch):
            return "its rotary embedding does not rotate pairs (i, i + D/2)"
    return Replacement(Rebound(type(module), {FUNCTION: _ours}), "rope")


def _rotates_halves(function: Any, batch: int) -> bool:
    q, k, angles = random(2, 4, 5, 8), random(2, 3, 5, 8), random(batch, 5, 4)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))

    def flat(pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([one.flatten() for one in pair])

    return agree(lambda: flat(function(q, k, cos, sin)), lambda: flat(rotate(q, k, cos, sin, original=None)))
