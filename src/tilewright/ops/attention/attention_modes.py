"""Attention with windows, documents, biases, masks, sinks, dropout and functions of the score; and its log-sum-exp.

Every mode is a switch of one kernel (`_forward.py`, `_backward.py`), which visits only the blocks of keys that a block
of queries sees. As in plain attention, the scores never reach memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.attention._formula import BOTTOM_RIGHT, TOP_LEFT, Modes, attend_with_modes, mirrored, seen
from tilewright.ops.attention._modes import attention_with_modes, dropout_kept
from tilewright.ops.attention._mods import mask_mod_key, score_mod_key
from tilewright.ops.attention.attention import MAX_HEAD, scaled_dot_product_attention
from tilewright.runtime.eligibility import eligible
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["attention"]

TENSORS = {
    "bias": ("bias",),
    "row bias": ("bias",),
    "mask": ("mask",),
    "alibi": ("alibi_slopes",),
    "sinks": ("sinks",),
    "everything": ("bias", "mask", "alibi_slopes", "sinks"),
}


def _soft(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.5 * torch.tanh(score) - 0.01 * abs(q_idx - kv_idx)


def _dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx - kv_idx) % 3 == 0) | (kv_idx < 5)


def _options(mode: str, LQ: int, LK: int) -> dict[str, Any]:
    """Return the options of `attention` by the name of a mode; those that are tensors are inputs of the Op."""
    documents = [tuple(n * part // 16 for part in (0, 2, 2, 7, 16)) for n in (LQ, LK)]  # one is empty
    packed = {"causal": BOTTOM_RIGHT, "cu_seqlens_q": documents[0], "cu_seqlens_k": documents[1]}
    found = {
        "causal": {"causal": BOTTOM_RIGHT},
        "window": {"causal": BOTTOM_RIGHT, "window": (LK // 16, 0)},
        "both sides": {"window": (LK // 8, LK // 16)},
        "softcap": {"causal": BOTTOM_RIGHT, "softcap": 2.0},
        "documents": packed,
        "score_mod": {"score_mod": _soft},
        "mask_mod": {"mask_mod": _dilated},
        "sinks": {"causal": TOP_LEFT},
        "everything": packed | {"window": (LK // 2, None), "softcap": 2.0, "score_mod": _soft, "mask_mod": _dilated},
    }
    return found.get(mode, {})


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mode: str,
) -> tuple[Tensor, Tensor]:
    modes, documents = _parse(q, k, **_options(mode, q.shape[2], k.shape[2]))
    sees = None if documents is None else seen(q.shape[2], k.shape[2], modes, documents)
    return attend_with_modes(q, k, v, bias, mask, alibi_slopes, sinks, sees, None, modes)


def _pairs(q: Tensor, k: Tensor, mode: str) -> int:
    """Return the number of pairs of a query and a key that positions let it see."""
    LQ, LK = q.shape[2], k.shape[2]
    modes, documents = _parse(q, k, **_options(mode, LQ, LK))
    begin, end, _ = seen(LQ, LK, modes, documents and tuple(x.cpu() for x in documents))
    return q.shape[0] * q.shape[1] * int((end - begin).sum())


def _bytes(*tensors: Tensor | None) -> int:
    return sum(x.nbytes for x in tensors if x is not None)


def cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mode: str,
) -> Cost:
    pairs, rows = _pairs(q, k, mode), q.numel() // max(1, q.shape[-1])
    return Cost(
        read=_bytes(q, k, v, bias, mask, alibi_slopes, sinks),
        written=rows * (v.shape[-1] * q.element_size() + 4),
        flops={matrix_unit(q.dtype): 2 * pairs * (q.shape[-1] + v.shape[-1]), "special": pairs},
    )


def backward_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mode: str,
) -> Cost:
    pairs, rows = _pairs(q, k, mode), q.numel() // max(1, q.shape[-1])
    outputs = 2 * rows * (v.shape[-1] * q.element_size() + 4)  # and their gradients
    return Cost(
        read=_bytes(q, k, v, bias, mask, alibi_slopes, sinks) + outputs,
        written=_bytes(q, k, v, bias, alibi_slopes, sinks),
        flops={matrix_unit(q.dtype): 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]), "special": pairs},
    )


def inputs(draw: Draw) -> tuple[Any, ...]:
    q, k, v = draw.randn("B", "H", "LQ", "D"), draw.randn("B", "HKV", "LK", "D"), draw.randn("B", "HKV", "LK", "DV")
    if draw.values == "special":  # in torch, infinities and NaN reach rows that do not see them: 0 * inf
        q, k, v = (x.masked_fill(~x.isfinite(), 0.0) for x in (q, k, v))
    drawn = {
        "bias": lambda: draw.randn(1, "H", 1 if draw["mode"] == "row bias" else "LQ", "LK"),
        "mask": lambda: draw.randn(1, 1, "LQ", "LK") > -1.0,
        "alibi_slopes": lambda: draw.randn("H", scale=0.1),
        "sinks": lambda: draw.randn("H"),
    }
    wanted = TENSORS.get(draw["mode"], ())
    return q, k, v, *(draws() if name in wanted else None for name, draws in drawn.items()), draw["mode"]


op = Op(
    "attention_modes",
    reference,
    cost,
    inputs=inputs,
    takes=lambda case: case["HKV"] > 0 and case["H"] % case["HKV"] == 0,
    check=points(
        B=(1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2),
        H=(2, 1, 4, 1, 2, 2, 2, 2, 1, 1, 2, 2),
        HKV=(2, 1, 2, 1, 1, 2, 2, 2, 1, 1, 1, 1),
        LQ=(40, 70, 33, 130, 17, 33, 37, 33, 90, 40, 70, 33),
        LK=(40, 130, 33, 130, 40, 40, 33, 40, 70, 40, 90, 40),
        D=(16, 16, 24, 64, 16, 16, 40, 16, 16, 16, 16, 16),
        DV=(16, 16, 24, 64, 32, 16, 16, 16, 16, 16, 16, 16),
        mode=(
            *("causal", "window", "softcap", "documents", "bias", "row bias", "mask", "alibi", "both sides"),
            *("score_mod", "mask_mod", "everything"),
        ),
    ),
    bench=points(
        B=(1, 1, 4, 4),
        H=(16, 16, 16, 16),
        HKV=(16, 16, 16, 16),
        LQ=(16384, 16384, 4096, 4096),
        LK=(16384, 16384, 4096, 4096),
        D=(128, 128, 128, 128),
        DV=(128, 128, 128, 128),
        mode=("window", "documents", "softcap", "bias"),
    ),
    backward_cost=backward_cost,
    batch="B",
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [B, H, LQ, D] to k [B, HKV, LK, D] and v [B, HKV, LK, DV], where HKV divides H.

    A score is scaled, capped by `softcap * tanh(score / softcap)`, passed to `score_mod(score, b, h, q_idx, kv_idx)`,
    and gets `-alibi_slopes * |distance|` and `bias` added. A query that sees no key gets zeros, and -inf as its lse.

    causal: "top-left" (or True, as in torch) or "bottom-right", where the last query sees all keys. Both place the
        diagonal, from which windows and ALiBi distances are counted; without causal it is at the bottom right.
    window: keys that are visible before and after the diagonal; None or -1 for all.
    alibi_slopes: [H] or [B, H].
    bias: broadcasts to [B, H, LQ, LK], and has a gradient.
    mask: boolean, true where a key is visible; broadcasts to [B, H, LQ, LK].
    cu_seqlens_q, cu_seqlens_k: cumulative lengths of documents, from 0. A query sees the keys of its own document.
    sinks: [H]: logits that take part in the softmax without a value.
    dropout_p, seed: the same seed drops the same probabilities; by default torch's generator draws one.
    mask_mod: a function of (b, h, q_idx, kv_idx), as in FlexAttention; blocks that it hides are skipped.
    return_lse: return the natural log-sum-exp [B, H, LQ] too, which has a gradient.
    deterministic: gradients always are, since no kernel adds with atomics.
    """
    _require_shapes(q, k, v, alibi_slopes, bias, mask, sinks)
    modes, documents = _parse(
        q, k, causal=causal, window=window, softcap=softcap, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        dropout_p=dropout_p, scale=scale, score_mod=score_mod, mask_mod=mask_mod,
    )  # fmt: skip
    tensors = alibi_slopes, bias, mask, sinks, documents
    LQ, LK = q.shape[2], k.shape[2]
    is_causal = modes.right == 0 and (modes.diagonal == TOP_LEFT or LQ == LK)
    plain = Modes(modes.scale, modes.diagonal, right=modes.right)
    if modes == plain and (is_causal or modes.right is None) and not return_lse and all(x is None for x in tensors):
        return scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=modes.scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    bias, mask = (x if x is None else x[(None,) * (4 - x.dim())] for x in (bias, mask))
    slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 2 else alibi_slopes[None]
    sees, seen_by = None, None
    if documents is not None:
        sees, seen_by = seen(LQ, LK, modes, documents), seen(LK, LQ, mirrored(modes), documents[::-1])
    is_small = max(q.shape[-1], v.shape[-1]) <= MAX_HEAD
    if eligible(q, k, v) and is_small and min(q.numel(), k.numel(), v.numel()) > 0:
        seed_tensor = _seed(seed, q.device) if dropout_p else None
        out, lse = attention_with_modes(q, k, v, bias, mask, slopes, sinks, seed_tensor, sees, seen_by, modes)
        return (out, lse * math.log(2.0)) if return_lse else out
    kept = _kept_by_torch(seed, (*q.shape[:3], LK), dropout_p, q.device) if dropout_p else None
    out, lse = attend_with_modes(q, k, v, bias, mask, slopes, sinks, sees, kept, modes)
    return (out, lse) if return_lse else out


def _parse(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> tuple[Modes, tuple[Tensor, Tensor] | None]:
    """Return the options of `attention` that are not tensors, and the cumulative lengths of documents."""
    if causal not in (False, True, TOP_LEFT, BOTTOM_RIGHT):
        raise ValueError(f"causal must be False, True, '{TOP_LEFT}' or '{BOTTOM_RIGHT}', not {causal!r}")
    if window is not None and not (isinstance(window, Sequence) and len(window) == 2):
        raise ValueError(f"window must be two numbers of keys, before and after the diagonal, or None, not {window!r}")
    if softcap is not None and softcap < 0:
        raise ValueError(f"softcap must be positive, or 0 or None for none, not {softcap}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, not {dropout_p}")
    left, right = (None if n is None or n < 0 else n for n in window or (None, None))
    modes = Modes(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        diagonal=TOP_LEFT if causal in (True, TOP_LEFT) else BOTTOM_RIGHT,
        left=left,
        right=0 if causal else right,
        softcap=float(softcap or 0.0),
        dropout_p=float(dropout_p),
        score_mod=None if score_mod is None else score_mod_key(score_mod),
        mask_mod=None if mask_mod is None else mask_mod_key(mask_mod),
    )
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return modes, None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("documents need both cu_seqlens_q and cu_seqlens_k; for self-attention pass the same twice")
    of_queries, of_keys = (torch.as_tensor(x, device=q.device) for x in (cu_seqlens_q, cu_seqlens_k))
    if of_queries.dim() != 1 or of_queries.shape != of_keys.shape or of_queries.shape[0] < 2:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be cumulative lengths of the same number of documents, from 0, "
            f"not of shapes {tuple(of_queries.shape)} and {tuple(of_keys.shape)}"
        )
    _require_cumulative("cu_seqlens_q", cu_seqlens_q, q.shape[2])
    _require_cumulative("cu_seqlens_k", cu_seqlens_k, k.shape[2])
    return modes, (of_queries, of_keys)


def _require_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention takes q, k and v of shape [batch, heads, length, head size], not {shapes}")
    (B, H), HKV = q.shape[:2], k.shape[1]
    if k.shape[0] != B or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or HKV == 0 or H % HKV:
        raise ValueError(f"{shapes} do not fit: q [B, H, LQ, D], k [B, HKV, LK, D], v [B, HKV, LK, DV], HKV divides H")
    if alibi_slopes is not None and alibi_slopes.shape not in ((H,), (B, H), (1, H)):
        raise ValueError(f"alibi_slopes must be of shape [{H}] or [{B}, {H}], not {tuple(alibi_slopes.shape)}")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks must be of shape [{H}], one per head, not {tuple(sinks.shape)}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, true where a key is visible, not {mask.dtype}; add numbers as bias")
    scores = B, H, q.shape[2], k.shape[2]
    for name, x in {"bias": bias, "mask": mask}.items():
        if x is not None and not _broadcasts(x.shape, scores):
            raise ValueError(f"{name} must broadcast to the scores {[*scores]}, which {[*x.shape]} does not")
    for name, x in {"alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "sinks": sinks}.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: move it there")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


def _require_cumulative(name: str, given: Tensor | Sequence[int], length: int) -> None:
    """Raise unless these are cumulative lengths. Those on a GPU are not read, which would wait for it."""
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dtype == torch.bool:
            raise TypeError(f"{name} must be integers, not {given.dtype}")
        if given.device.type != "cpu" or type(given) is not Tensor or torch.compiler.is_compiling():
            return
    values = given.tolist() if isinstance(given, Tensor) else [*given]
    if values[0] != 0 or values[-1] > length or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} must begin with 0, never decrease, and end with at most {length}, the total length")


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return the seed in memory, so that drawing one does not wait for the GPU and a CUDA graph can replay it."""
    if seed is None:
        return torch.randint(2**62, (1,), device=device)
    if isinstance(seed, Tensor):
        return seed.to(device, torch.int64).reshape(1)
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def _kept_by_torch(seed: int | Tensor | None, shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))
    return torch.rand(shape, generator=generator, device=device) >= p


@op.also
def every_mode_at_once(device: str) -> None:
    randn = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    q, k, v = (randn(1, 8, 4096, 128) for _ in range(3))
    given = {"bias": randn(8, 4096, 4096), "alibi_slopes": randn(8), "sinks": randn(8)}
    options = _options("everything", 4096, 4096) | given | {"dropout_p": 0.1, "seed": 1}
    out, lse = attention(q, k, v, **options, return_lse=True)
    leaves = [q, k, v, *given.values()]
    torch.autograd.grad([out, lse], leaves, [torch.empty_like(out), torch.empty_like(lse)])
    dropout_kept(torch.empty(1, dtype=torch.int64, device=device), (1, 8, 4096, 4096), 0.1)


@op.kernel("triton", language="triton")
def flash_with_modes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mode: str,
) -> tuple[Tensor, Tensor]:
    options = _options(mode, q.shape[2], k.shape[2])
    tensors = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    return attention(q, k, v, **tensors, **options, return_lse=True)  # pyright: ignore[reportReturnType]
