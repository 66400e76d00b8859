"""Rotary embedding in attention layers that call a function `apply_rotary_pos_emb(q, k, cos, sin)`.

That function is a global of the layer's file. Replacing it there would change every model in the process, so the
layer's `forward` gets a copy with other globals.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.probe import agree, is_plain, random
from tilewright.models.replacements import Replacement
from tilewright.ops.rope import rope

FUNCTION = "apply_rotary_pos_emb"


class Rebound:
    """The forward function of a class, with our rotary embedding among its globals."""

    def __init__(self, owner: type[nn.Module]):
        original: Any = owner.forward
        # Without its name, so that torch.compile does not look globals up in the original module.
        scope = {name: value for name, value in original.__globals__.items() if name != "__name__"}
        scope[FUNCTION] = partial(rotate, original=original.__globals__[FUNCTION])
        self.owner = owner
        self.fn = types.FunctionType(original.__code__, scope, "forward", original.__defaults__, original.__closure__)
        self.fn.__kwdefaults__ = original.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rebound, (self.owner,)


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
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or FUNCTION not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(FUNCTION)
    if theirs is None:
        return None
    for batch in (1, 2):
        if not _rotates_halves(theirs, batch):
            return "its rotary embedding does not rotate pairs (i, i + D/2)"
    return Replacement(Rebound(type(module)), "rope")


def _rotates_halves(function: Any, batch: int) -> bool:
    q, k, angles = random(2, 4, 5, 8), random(2, 3, 5, 8), random(batch, 5, 4)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))

    def flat(pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([one.flatten() for one in pair])

    return agree(lambda: flat(function(q, k, cos, sin)), lambda: flat(rotate(q, k, cos, sin, original=None)))
