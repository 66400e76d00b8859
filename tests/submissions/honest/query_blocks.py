"""Attention in blocks of 16 queries."""

OP = "attention"

import math

import torch


def attention(q, k, v, causal):
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    rows = torch.arange(q.shape[2], device=q.device).split(16)
    blocks = []
    for block, row in zip(q.float().split(16, 2), rows, strict=True):
        scores = block @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            later = torch.arange(k.shape[2], device=q.device) > row[:, None]
            scores = scores.masked_fill(later, -math.inf)
        blocks.append(torch.softmax(scores, -1) @ v)
    return torch.cat(blocks, 2).to(q.dtype)
