"""`flash_attn_func` and `flash_attn_varlen_func`, with the arguments of the package flash_attn.

Tensors are [batch, length, heads, head size], or [total length, heads, head size] with documents one after the other.
"""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.attention.attention_modes import attention

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q [B, LQ, H, D] to k and v [B, LK, HKV, D]; causal, the last query sees all keys.

    With `return_attn_probs` it returns the log-sum-exp [B, H, LQ] too, and None for the probabilities, which never
    reach memory.
    """
    _require_fit("flash_attn_func", q, k, v, "batch, length, heads, head size")
    out, lse = attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=causal and "bottom-right", window=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, scale=softmax_scale, return_lse=True,
        deterministic=deterministic,
    )  # fmt: skip
    return (out.transpose(1, 2), lse, None) if return_attn_probs else out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within documents: q [total, H, D], k and v [total, HKV, D], and their cumulative lengths, from 0.

    The largest lengths are not needed. With `return_attn_probs` it returns the log-sum-exp [H, total] too, and None.
    """
    if block_table is not None:
        raise NotImplementedError(
            "flash_attn_varlen_func reads no paged cache: pass contiguous keys, and no block_table"
        )
    _require_fit("flash_attn_varlen_func", q, k, v, "total length, heads, head size")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("flash_attn_varlen_func needs cu_seqlens_q and cu_seqlens_k, the cumulative lengths from 0")
    out, lse = attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), causal=causal and "bottom-right", window=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        dropout_p=dropout_p, scale=softmax_scale, return_lse=True, deterministic=deterministic,
    )  # fmt: skip
    return (out[0].transpose(0, 1), lse[0], None) if return_attn_probs else out[0].transpose(0, 1)


def _require_fit(name: str, q: Tensor, k: Tensor, v: Tensor, dims: str) -> None:
    """Raise with the shapes as they were passed; `attention` sees them transposed."""
    shapes = f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]}"
    if any(x.dim() != dims.count(",") + 1 for x in (q, k, v)):
        raise ValueError(f"{name} takes q, k and v of shape [{dims}], not {shapes}")
    is_same_batch = q.dim() == 3 or q.shape[0] == k.shape[0]
    if not is_same_batch or k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or not k.shape[-2]:
        raise ValueError(f"{name}: {shapes} do not fit; the dimensions are [{dims}]")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{name}: the {q.shape[-2]} heads of q must be a multiple of the {k.shape[-2]} of k and v")
