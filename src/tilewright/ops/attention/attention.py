"""Attention: softmax(q kᵀ / √d) v, over all keys or, if causal, over those not after the query.

The scores never reach memory (flash attention): a program keeps a block of queries, iterates over the keys, and
rescales its sums whenever a larger score appears. Backward recomputes the scores from the log-sum-exp of each row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.ops.attention import _gluon
from tilewright.ops.attention._formula import TOP_LEFT, Modes, attend
from tilewright.ops.attention._modes import attention_with_modes
from tilewright.ops.attention._operators import attention_forward
from tilewright.ops.linear._gluon import runs_on
from tilewright.runtime.crossovers import Crossover, never
from tilewright.runtime.eligibility import eligible
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["scaled_dot_product_attention"]

MAX_HEAD = 256


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attend(q, k, v, causal, q.shape[-1] ** -0.5)


def _scores(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the number of pairs of a query and a visible key."""
    LQ, LK = q.shape[2], k.shape[2]
    short = min(LQ, LK)  # queries with one visible key more than the query before
    return q.shape[0] * q.shape[1] * (short * (short + 1) // 2 + (LQ - short) * LK if causal else LQ * LK)


def cost(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Cost:
    scores = _scores(q, k, causal)
    return Cost(
        read=q.nbytes + k.nbytes + v.nbytes,
        written=q.nbytes,
        flops={matrix_unit(q.dtype): 4 * scores * q.shape[-1], "special": scores},
    )


def backward_cost(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Cost:
    scores = _scores(q, k, causal)
    lse = 4 * q.numel() // q.shape[-1]
    return Cost(
        read=3 * q.nbytes + k.nbytes + v.nbytes + lse,  # q, out, dout
        written=q.nbytes + k.nbytes + v.nbytes,
        flops={matrix_unit(q.dtype): 10 * scores * q.shape[-1], "special": scores},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor, bool]:
    q = draw.randn("B", "H", "LQ", "D")
    return q, draw.randn("B", "HKV", "LK", "D"), draw.randn("B", "HKV", "LK", "D"), draw["causal"]


op = Op(
    "attention",
    reference,
    cost,
    inputs=inputs,
    takes=lambda case: case["HKV"] > 0 and case["H"] % case["HKV"] == 0,
    check=points(
        B=(1, 2, 1, 1, 1, 1, 1, 1, 1, 1),
        H=(1, 1, 4, 2, 4, 1, 2, 1, 2, 1),
        HKV=(1, 1, 2, 2, 1, 1, 1, 1, 1, 1),
        LQ=(1, 17, 64, 130, 17, 130, 200, 128, 256, 33),
        LK=(17, 17, 64, 130, 130, 17, 300, 384, 256, 17),
        D=(8, 16, 64, 40, 16, 64, 128, 64, 128, 256),
        causal=(False, True, True, False, True, True, True, False, True, False),
    ),
    bench=points(
        B=(4, 4, 4, 4, 16, 16, 1, 1, 4),
        H=(16, 16, 32, 32, 16, 16, 16, 16, 32),
        HKV=(16, 16, 32, 32, 16, 16, 16, 16, 8),
        LQ=(4096, 4096, 4096, 4096, 1024, 1024, 8192, 8192, 4096),
        LK=(4096, 4096, 4096, 4096, 1024, 1024, 8192, 8192, 4096),
        D=(128, 128, 64, 64, 128, 128, 128, 128, 128),
        causal=(False, True, False, True, False, True, False, True, True),
    ),
    backward_cost=backward_cost,
    batch="B",
)


def _same_lengths_if_causal(q: Tensor, k: Tensor, causal: bool) -> bool:
    return not causal or q.shape[2] == k.shape[2]  # torch's kernels place the diagonal elsewhere


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    D, has_rows = q.shape[-1], all(x.stride(-1) == 1 and x.storage_offset() % 8 == 0 for x in (q, k, v))
    small = D <= 256 and D % 8 == 0 and q.shape[0] < 2**16  # the batch is a grid dimension
    return q.dtype != torch.float32 and small and has_rows and _same_lengths_if_causal(q, k, causal)


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    return _fits_flash(q, k, v, causal) and q.shape[-1] <= 128 and k.shape[2] > 1


def _torch_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


@op.kernel("sdpa-flash", language="cuda", fits=_fits_flash, origin="baseline")
def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _torch_backend(SDPBackend.FLASH_ATTENTION, q, k, v, causal)


@op.kernel("sdpa-cudnn", language="cuda", fits=_fits_cudnn, origin="baseline")
def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _torch_backend(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)


def _fits(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    return q.numel() > 0 and k.numel() > 0 and q.shape[-1] <= MAX_HEAD


@op.kernel("triton", language="triton", fits=_fits)
def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attention_forward(q, k, v, causal, q.shape[-1] ** -0.5)[0]


def _fits_gluon(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    return _gluon.fits(q, k, v) and runs_on(q.get_device())


@op.kernel("gluon-cooperative", language="gluon", fits=_fits_gluon, differentiable=False)
def gluon_cooperative(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One warp copies with TMA, and two warpgroups share the keys, each with half of the queries.

    In the Triton kernel all warps load, multiply and compute exponentials at the same time.
    """
    return _gluon.attention("cooperative", q, k, v, causal, q.shape[-1] ** -0.5)[0]


@op.kernel("gluon-pingpong", language="gluon", fits=_fits_gluon, differentiable=False)
def gluon_pingpong(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The consumers take turns with the tensor cores. Cooperative ones may compute exponentials at the same time."""
    return _gluon.attention("pingpong", q, k, v, causal, q.shape[-1] ** -0.5)[0]


@op.kernel("gluon-overlapped", language="gluon", fits=_fits_gluon, differentiable=False)
def gluon_overlapped(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A consumer computes exponentials while its product with the values runs, which ping-pong ones wait for."""
    return _gluon.attention("overlapped", q, k, v, causal, q.shape[-1] ** -0.5)[0]


def _pairs(q: Tensor, k: Tensor, *_: object) -> int:
    return q.shape[2] * k.shape[2]


# cuDNN, which torch calls, wins every recorded case. With a mask, and with values of another size, nothing is measured.
CROSSOVER = Crossover("attention", never, unit="pairs", size=_pairs)
MODES_CROSSOVER = Crossover("attention modes", never, unit="pairs", size=_pairs)


def _is_eligible(crossover: Crossover, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    return (
        query.dim() == key.dim() == value.dim() == 4
        and crossover.reached(_pairs(query, key), query.get_device())
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[:3] == value.shape[:3]
        and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % max(1, key.shape[1]) == 0))
        and min(query.numel(), key.numel(), value.numel()) > 0
        and max(query.shape[3], value.shape[3]) <= MAX_HEAD
        and eligible(query, key, value)
    )


def _is_ours(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> bool:
    """Return whether torch would take this mask, and our kernel too."""
    if mask is None:
        return True
    pairs = (*query.shape[:3], key.shape[2])
    fits = 2 <= mask.dim() <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], pairs[::-1], strict=False))
    return fits and not is_causal and mask.device == query.device and mask.dtype in (torch.bool, query.dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention, with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""
    if dropout_p == 0.0 and (scale is None or 0 < scale < math.inf):
        factor = scale or query.shape[-1] ** -0.5
        is_plain = attn_mask is None and key.shape == value.shape
        if is_plain and _is_eligible(CROSSOVER, query, key, value, enable_gqa):
            return attention_forward(query, key, value, is_causal, factor)[0]
        if (
            not is_plain
            and _is_eligible(MODES_CROSSOVER, query, key, value, enable_gqa)
            and _is_ours(attn_mask, query, key, is_causal)
        ):
            mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
            bias, mask = (None, mask) if mask is None or mask.dtype == torch.bool else (mask, None)
            modes = Modes(factor, TOP_LEFT, right=0 if is_causal else None)
            return attention_with_modes(query, key, value, bias, mask, None, None, None, None, None, modes)[0]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
