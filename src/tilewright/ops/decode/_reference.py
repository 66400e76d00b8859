"""Attention against a KV cache in torch operations, in any precision: what the kernels must compute.

A cache is contiguous, one sequence after the other, or paged: `block_table` [B, pages per sequence] names the page that
holds the tokens i * page … (i + 1) * page - 1 of a sequence. Entries past the length of a sequence may be anything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LAYOUTS = ("NHD", "HND")  # [tokens, heads, D] or [heads, tokens, D] within a sequence or a page


def token_major(cache: Tensor, layout: str) -> Tensor:
    """Return a view [sequences or pages, tokens, heads, D] of a cache."""
    return cache.transpose(1, 2) if layout == "HND" else cache


def dense(cache: Tensor, lengths: Tensor, block_table: Tensor | None, layout: str = "NHD") -> Tensor:
    """Return the cached tokens as [B, T, heads, D]. Those past the length of a sequence are zero."""
    cache = token_major(cache, layout)
    if block_table is not None:
        page, pages = cache.shape[1], block_table.shape[1]
        is_used = torch.arange(pages, device=lengths.device) * page < lengths[:, None]
        cache = cache[torch.where(is_used, block_table, 0).long()].flatten(1, 2)
    is_cached = torch.arange(cache.shape[1], device=lengths.device) < lengths[:, None]
    return torch.where(is_cached[:, :, None, None], cache, torch.zeros((), dtype=cache.dtype, device=cache.device))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, LQ, H, DV] and the log-sum-exp [B, LQ, H] of q [B, LQ, H, D].

    k [B, T, HKV, D] and v [B, T, HKV, DV] hold `lengths` tokens per sequence; the last LQ of them are those of the
    queries. `window` 0 and `softcap` 0 mean none.
    """
    (LQ, H), (T, HKV) = q.shape[1:3], k.shape[1:3]
    group = H // max(1, HKV)
    packed = q.unflatten(2, (HKV, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, HKV, group * LQ, D]
    k, v = (x.to(q.dtype).transpose(1, 2) for x in (k, v))  # [B, HKV, T, D]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (packed @ k.transpose(-1, -2)).to(wide).unflatten(2, (group, LQ)) * scale  # [B, HKV, group, LQ, T]
    if k_scale is not None:
        scores = scores * k_scale.to(wide)[:, None, None, None]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_tokens(lengths, LQ, T, causal, window)[:, None, None]
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide).view(HKV, group, 1))
    probabilities = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = (probabilities.to(q.dtype).flatten(2, 3) @ v).unflatten(2, (group, LQ))  # [B, HKV, group, LQ, DV]
    if v_scale is not None:
        out = (out * v_scale.to(wide)[:, None, None, None]).to(q.dtype)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def visible_tokens(lengths: Tensor, LQ: int, T: int, causal: bool, window: int) -> Tensor:
    """Return which of T tokens each query sees, [B, LQ, T]."""
    token = torch.arange(T, device=lengths.device)
    visible = (token < lengths[:, None])[:, None].expand(-1, LQ, -1)
    if causal:
        at = (lengths[:, None] - LQ + torch.arange(LQ, device=lengths.device))[..., None]  # position of the query
        visible = visible & (token <= at)
        visible = visible & (token > at - window) if window else visible
    return visible
