"""Attention in torch operations, with the scores in memory: the truth of checks, differentiated by double backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.attention._mods import mod

TOP_LEFT, BOTTOM_RIGHT = "top-left", "bottom-right"


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention in torch operations; the number of heads of q is a multiple of that of k and v."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * scale  # [B, H, LQ, LK]
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


class Modes(NamedTuple):
    """The options of a call that are not tensors.

    The center of query i is key i, or key i + LK - LQ with the bottom-right diagonal. A query sees the keys from
    `left` before its center to `right` after it; None is unlimited. A score is scaled, capped, passed to `score_mod`,
    and then receives its ALiBi and bias. `score_mod` and `mask_mod` are keys of `_mods.mod`.
    """

    scale: float
    diagonal: str = BOTTOM_RIGHT  # or TOP_LEFT
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0  # 0: none
    dropout_p: float = 0.0
    score_mod: str | None = None
    mask_mod: str | None = None


def seen(length: int, other: int, modes: Modes, documents: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return what each position of one side sees of the other side [3, length]: begin, end and center.

    The sides are queries and keys, or keys and queries with `mirrored` modes. `documents` are the cumulative lengths
    of both; a position after the last document sees nothing. Begin and end never decrease.
    """
    device = documents[0].device if documents else None
    mine, theirs = documents or (torch.tensor([0, n]) for n in (length, other))
    mine, theirs = mine.long(), theirs.long()
    position = torch.arange(length, device=device)
    document = torch.searchsorted(mine[1:].contiguous(), position, right=True).clamp_max(mine.shape[0] - 2)
    start, stop, first, last = (x[document] for x in (mine[:-1], mine[1:], theirs[:-1], theirs[1:]))
    center = first + position - start
    if modes.diagonal == BOTTOM_RIGHT:
        center = center + (last - first) - (stop - start)
    begin = first if modes.left is None else (center - modes.left).clamp(first, last)
    end = last if modes.right is None else (center + modes.right + 1).clamp(first, last)
    is_outside = position >= mine[-1]
    begin, end = (torch.where(is_outside, theirs[-1], x) for x in (begin, end))
    # Lengths on a GPU are not read: no kernel may follow them out of the tensor.
    begin, end = begin.clamp(0, other), end.clamp(0, other)
    return torch.stack([begin, end, center]).int()


def mirrored(modes: Modes) -> Modes:
    """Return the modes seen from the keys: a key is seen by the queries from `right` before to `left` after it."""
    return modes._replace(left=modes.right, right=modes.left)


def attend_with_modes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    sees: Tensor | None,
    kept: Tensor | None,
    modes: Modes,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row; rows that see nothing are zero, and -inf.

    `sees` is what `seen` returns for the queries, where documents decide it. `kept` is a boolean tensor
    [B, H, LQ, LK]: the probabilities that dropout keeps.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    (H, LQ), LK = q.shape[1:3], k.shape[2]
    b, h, i, j = (torch.arange(n, device=q.device) for n in (q.shape[0], H, LQ, LK))
    places = b[:, None, None, None], h[:, None, None], i[:, None], j
    begin, end, center = (seen(LQ, LK, modes) if sees is None else sees).to(q.device)
    visible = (j >= begin[:, None]) & (j < end[:, None])
    if modes.mask_mod is not None:
        visible = visible & mod(modes.mask_mod).on_tensors(*places)
    if mask is not None:
        visible = visible & mask

    scores = q @ k.transpose(-1, -2) * modes.scale  # [B, H, LQ, LK]
    if modes.softcap:
        scores = modes.softcap * torch.tanh(scores / modes.softcap)
    if modes.score_mod is not None:
        scores = mod(modes.score_mod).on_tensors(scores, *places)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * (center[:, None] - j).abs()
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([sinks[:, None, None].expand(*scores.shape[:3], 1).to(scores), scores], -1)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(is_empty, 0.0)  # -inf - -inf would be NaN, and so would be its gradient
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse).masked_fill(is_empty, 0.0)
    p = p if sinks is None else p[..., 1:]
    if kept is not None:
        p = p * kept / (1.0 - modes.dropout_p)
    lse = lse.masked_fill(is_empty, -math.inf)[..., 0]
    return p.to(v.dtype) @ v, lse if lse.dtype == torch.float64 else lse.float()
