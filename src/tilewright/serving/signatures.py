"""Attention against KV caches under the signatures of FlashAttention, FlashMLA and FlashInfer.

Each function runs `decode_attention` or `mla_decode`, and raises NotImplementedError for an argument that these do not
support; none is ignored if it would change the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.decode._reference import LAYOUTS
from tilewright.ops.decode.decode_attention import decode_attention
from tilewright.ops.decode.mla_decode import LATENT, mla_decode

LN_2 = math.log(2.0)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention against a KV cache, with the arguments of FlashAttention's function of this name.

    The log-sum-exp is [B, H, LQ], as in FlashAttention. k and v are written to the caches after `cache_seqlens` tokens.
    """
    _unsupported(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    left, right = window_size
    if right > 0 or (right < 0 <= left and not causal):
        raise NotImplementedError(f"window_size={window_size} looks ahead; use causal=True or a right side of 0")
    is_causal = causal or right == 0 or q.shape[1] == 1  # one query, the last token, sees all of them either way
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    found = decode_attention(
        q, k_cache, v_cache, cache_seqlens, block_table, scale=softmax_scale, causal=is_causal,
        window=left + 1 if left >= 0 else None, softcap=softcap or None, k_new=k, v_new=v, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, num_splits=num_splits or None, return_lse=True,
    )  # fmt: skip
    return (found[0], found[1].transpose(1, 2)) if return_softmax_lse else found[0]


def get_mla_metadata(*args: Any, **options: Any) -> tuple[None, None]:
    """Return nothing, twice: our kernel divides the work itself. Calls written for FlashMLA need no change."""
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention, with the arguments of FlashMLA's function of this name.

    The cache is [pages, page, 1, 576], or [pages, page, 1, 656] bytes if is_fp8_kvcache. The log-sum-exp is [B, H, LQ].
    `tile_scheduler_metadata` and `num_splits`, which divide the work in FlashMLA, are not used.
    """
    _unsupported(indices=indices)
    if head_dim_v != LATENT:
        raise ValueError(f"head_dim_v must be {LATENT}, not {head_dim_v}")
    if is_fp8_kvcache != (k_cache.dtype.itemsize == 1):
        raise ValueError(f"is_fp8_kvcache={is_fp8_kvcache} does not fit a cache of {k_cache.dtype}")
    out, lse = mla_decode(
        q, k_cache, cache_seqlens, block_table, scale=softmax_scale, causal=causal, return_lse=True
    )  # fmt: skip
    return out, lse.transpose(1, 2)


def block_table_from_csr(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, page: int, max_pages: int
) -> tuple[Tensor, Tensor]:
    """Return the block table [B, max_pages] and the lengths [B] of FlashInfer's paging, computed on its device.

    The pages of sequence b are kv_indices[kv_indptr[b] : kv_indptr[b + 1]]; kv_last_page_len tokens of the last one are
    used. `max_pages` bounds the pages of a sequence, since only the GPU knows their number.
    """
    first, count = kv_indptr[:-1, None], kv_indptr.diff()[:, None]
    column = torch.arange(max_pages, device=kv_indptr.device)
    at = (first + column).clamp(max=max(0, kv_indices.numel() - 1)).long()
    table = torch.where(column < count, kv_indices[at] if kv_indices.numel() else -1, -1).int()
    lengths = torch.where(count[:, 0] > 0, (count[:, 0] - 1) * page + kv_last_page_len, 0).int()
    return table, lengths


class BatchDecodeWithPagedKVCacheWrapper:
    """Decoding with FlashInfer's paging, with `plan` and `run` of FlashInfer's class of this name.

    Arguments that size its workspace are accepted and not used. The log-sum-exp is in base 2, as in FlashInfer.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD", **unused: Any):
        if kv_layout not in LAYOUTS:
            raise ValueError(f"kv_layout must be 'NHD' or 'HND', not {kv_layout!r}")
        self._layout = kv_layout
        self._paging: tuple[Tensor, Tensor] | None = None
        self._planned: tuple[int, int, int, int] = (0, 0, 0, 0)  # query heads, key heads, their size, the page size
        self._options: dict[str, Any] = {}

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        **unused: Any,
    ) -> None:
        """Convert the paging. Dtypes follow from the tensors of `run`, whose sizes must be those given here."""
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(
                f"pos_encoding_mode={pos_encoding_mode!r} is not supported: rotate q and k before"
            )
        _check_csr(indptr, indices, last_page_len, page_size)
        indptr, last_page_len = (x.to(indices.device) for x in (indptr, last_page_len))
        self._planned = num_qo_heads, num_kv_heads, head_dim, page_size
        self._paging = block_table_from_csr(indptr, indices, last_page_len, page_size, max(1, indices.numel()))
        self._options = {
            "window": window_left + 1 if window_left >= 0 else None,
            "softcap": logits_soft_cap or None,
            "scale": sm_scale,
        }

    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], *, return_lse: bool = False) -> Any:
        """Attend q [B, H, D] to the caches, a pair or one tensor [pages, 2, …]."""
        if self._paging is None:
            raise RuntimeError("call plan before run")
        k, v = paged_kv_cache.unbind(1) if isinstance(paged_kv_cache, Tensor) else paged_kv_cache
        if q.dim() != 3 or k.dim() != 4:
            raise ValueError(
                f"q must be [B, H, D] and the caches of four dimensions, not {[*q.shape]} and {[*k.shape]}"
            )
        page, heads = (1, 2) if self._layout == "NHD" else (2, 1)
        given = q.shape[1], k.shape[heads], q.shape[2], k.shape[page]
        if given != self._planned:
            names = "query heads, key heads, head size and page size"
            raise ValueError(f"plan was given {names} {self._planned}, but run has {given}")
        table, lengths = self._paging
        found = decode_attention(
            q[:, None], k, v, lengths, table, layout=self._layout, return_lse=True, **self._options
        )
        out, lse = found[0][:, 0], found[1][:, 0]
        return (out, lse / LN_2) if return_lse else out


def _check_csr(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page: int) -> None:
    """Raise where FlashInfer's paging does not fit together, as far as its values are on the host."""
    if indptr.dim() != 1 or last_page_len.shape != (indptr.shape[0] - 1,):
        shapes = f"{[*indptr.shape]} and {[*last_page_len.shape]}"
        raise ValueError(f"indptr must be [B + 1] and last_page_len [B], not {shapes}")
    if indptr.device.type == "cpu":
        ends = indptr.tolist()
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] > indices.numel():
            raise ValueError(f"indptr must ascend from 0 to at most the {indices.numel()} indices, not {ends}")
    if last_page_len.device.type == "cpu" and not bool(((last_page_len >= 0) & (last_page_len <= page)).all()):
        raise ValueError(f"last_page_len must be 0 to {page}, the page size, not {last_page_len.tolist()}")


def _unsupported(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported")
