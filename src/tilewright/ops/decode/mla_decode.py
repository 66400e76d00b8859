"""Multi-head latent attention (MLA) against a cache of latent vectors, in the absorbed form.

The cache holds one vector per token for all heads: 512 latent numbers and 64 that carry the rotary embedding. In the
absorbed form the projections of keys and values are part of q and of the output layer, so every head attends to these
vectors directly: scores are q · (latent, rotary), and the output is the average of the latents. That is attention of H
query heads with one key head of 576 and values that are its first 512 numbers.

In the quantized layout a token has 656 bytes: 512 float8_e4m3fn, 4 float32 scales of 128 of them each, 64 bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.decode._mla import _mla_fwd
from tilewright.ops.decode._reference import attend, dense
from tilewright.ops.decode._splits import LOG2_E, MIN_CHUNK, plan_splits
from tilewright.ops.decode._triton import _combine_fwd
from tilewright.ops.decode._validate import (
    check_lengths,
    check_splits,
    check_tables,
    is_eligible,
    require,
    require_tensor,
)
from tilewright.ops.decode.decode_attention import COMBINED_AT_ONCE, case_lengths, case_pages
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.gpus import GPUFacts, gpu_facts, has_fp8
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.pdl import dependent_launch, has_pdl
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Case, Cost, Draw, Op, matrix_unit, points

__all__ = ["mla_decode"]

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE  # elements per token
GROUP = 128  # quantized elements that share a scale
SCALES = LATENT // GROUP
PACKED_WIDTH = LATENT + 4 * SCALES + 2 * ROPE  # bytes per token of the quantized layout


def pack(latents: Tensor) -> Tensor:
    """Return vectors [..., 576] in the quantized layout, uint8 [..., 656]."""
    groups = latents[..., :LATENT].float().unflatten(-1, (SCALES, GROUP))
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (groups.abs().amax(-1) / largest).clamp_min(2.0**-126)
    quantized = (groups / scales[..., None]).clamp(-largest, largest).flatten(-2).to(torch.float8_e4m3fn)
    rope = latents[..., LATENT:].bfloat16().contiguous()
    return torch.cat([x.view(torch.uint8) for x in (quantized, scales, rope)], -1)


class Latents(NamedTuple):
    """Views of the parts of a cache."""

    latent: Tensor  # [..., 512]
    rope: Tensor  # [..., 64]
    scales: Tensor | None  # [..., 4]


def split(kv_cache: Tensor) -> Latents:
    """Return views of the parts of a cache [..., 576], or uint8 [..., 656]."""
    if kv_cache.dtype != torch.uint8:
        return Latents(kv_cache[..., :LATENT], kv_cache[..., LATENT:], None)
    scales = kv_cache.view(torch.float32)[..., LATENT // 4 : LATENT // 4 + SCALES]
    rope = kv_cache.view(torch.bfloat16)[..., PACKED_WIDTH // 2 - ROPE :]
    return Latents(kv_cache.view(torch.float8_e4m3fn)[..., :LATENT], rope, scales)


def unpack(kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors of a cache, [..., 576] in this dtype."""
    if kv_cache.dtype != torch.uint8:
        return kv_cache.to(dtype)
    latent, rope, scales = split(kv_cache.clone(memory_format=torch.contiguous_format))
    assert scales is not None
    wide = torch.promote_types(dtype, torch.float32)
    groups = latent.to(wide).unflatten(-1, (SCALES, GROUP)) * scales[..., None].to(wide)
    return torch.cat([groups.flatten(-2).to(dtype), rope.to(dtype)], -1)


def reference(
    q: Tensor, kv_cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float, causal: bool, tokens: int
) -> tuple[Tensor, Tensor]:
    k = unpack(dense(kv_cache.unsqueeze(2), lengths, block_table), q.dtype)  # [B, T, 1, 576]
    return attend(q, k, k[..., :LATENT], lengths, scale, causal=causal)


def cost(q: Tensor, kv_cache: Tensor, lengths: Tensor, block_table: Tensor | None, *others: Any) -> Cost:
    """Count `tokens`, the sum of the lengths, which have no values here."""
    tokens, (B, LQ, H, _) = others[-1], q.shape
    scores = tokens * LQ * H
    out = B * LQ * H * LATENT * q.element_size()
    tables = sum(x.nbytes for x in (lengths, block_table) if x is not None)
    return Cost(
        read=q.nbytes + tables + tokens * kv_cache.shape[-1] * kv_cache.element_size(),
        written=out + 4 * B * LQ * H,
        flops={matrix_unit(q.dtype): 2 * scores * (WIDTH + LATENT), "special": scores},
    )


def _inputs(draw: Draw) -> tuple[Any, ...]:
    B, T = draw["B"], draw["T"]
    known = case_lengths(B, T, draw["ragged"])
    lengths = torch.tensor(known, dtype=torch.int32, device=draw.device)
    pages, table = case_pages(draw, lengths)
    cache = draw.randn(pages, draw["page"] or T, WIDTH)
    cache = pack(cache) if draw["cache"] == "fp8" else cache
    return draw.randn("B", "LQ", "H", WIDTH), cache, lengths, table, WIDTH**-0.5, draw["causal"], sum(known)


def _takes(case: Case) -> bool:
    return all(int(case[name]) > 0 for name in ("B", "H", "LQ", "T"))


op = Op(
    "mla_decode",
    reference,
    cost,
    inputs=_inputs,
    check=points(
        B=(1, 2, 3, 1),
        H=(1, 16, 3, 5),
        LQ=(1, 1, 2, 3),
        T=(1, 20, 13, 5),
        page=(0, 16, 4, 0),
        cache=("same", "same", "fp8", "fp8"),
        ragged=(False, True, True, False),
        causal=(True, True, True, False),
    ),
    bench=points(
        B=(64, 64, 16, 64, 16),
        H=(128, 128, 16, 128, 16),
        LQ=(1, 1, 1, 1, 2),
        T=(4096, 32768, 32768, 32768, 32768),
        page=(64, 64, 64, 64, 64),
        cache=("same", "same", "same", "fp8", "fp8"),
        ragged=(False,) * 5,
        causal=(True,) * 5,
    ),
    takes=_takes,
    batch="B",
)


class MLA(NamedTuple):
    """The options of a call."""

    scale: float
    causal: bool
    num_splits: int  # 0: as many as keep the GPU busy


LARGE_SHARED = 160 * 1024  # bytes per block that hold 64 rows of queries and two buffers of 32 tokens


def _default(gpu: GPUFacts, size: int, quantized: bool, rows: int) -> Config:
    """Return the largest tile that compiles without spills: the accumulators alone are 512 columns."""
    if torch.version.hip is not None:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "per_sm": 1}
    is_large = gpu.shared_per_block >= LARGE_SHARED
    if size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2 if is_large else 1, "per_sm": 1}
    block_m = min(rows, 16 if not is_large else 32 if quantized else 64)
    return {"BLOCK_M": block_m, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "per_sm": 1}


def _choices(gpu: GPUFacts, size: int, quantized: bool, rows: int) -> list[Config]:
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "per_sm": 1}
        for m in (16, 32, 64)
        for n in (16, 32, 64)
        for warps in (4, 8)
        for stages in (1, 2)
        if m <= rows and (m + stages * n) * WIDTH * size <= gpu.shared_per_block and m * LATENT <= 64 * 32 * warps
    ]


def _most_rows(device: int) -> int:
    """Return the largest tile of queries.

    On sm_100 a tile of 64 would take the tensor cores that accumulate in tensor memory, whose 512 columns the output
    alone fills: Triton compiles it to a trap.
    """
    has_tensor_memory = device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 10
    return 32 if has_tensor_memory else 64


CONFIGS = ConfigTable("mla.json", _default, _choices, takes_gpu=True)
LAUNCHERS = {"mla": Launcher(_mla_fwd), "combine": Launcher(_combine_fwd)}


class _Sizes(NamedTuple):
    """The part of a plan's key that shapes and strides decide."""

    q: tuple[int, ...]
    q_strides: tuple[int, ...]
    cache: tuple[int, ...]  # [pages, tokens, width]
    strides: tuple[int, ...]  # page and token, for the latent and rotary parts and the scales
    table: tuple[int, int] | None  # pages per sequence, stride of a sequence


@cached_plan
def _plan(
    options: MLA, sizes: _Sizes, dtypes: tuple[torch.dtype | None, ...], device: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that takes the tensors of a call, launches, and returns the output and the log-sum-exp."""
    (B, LQ, H, _), (pages, tokens, _), dtype = sizes.q, sizes.cache, dtypes[0]
    quantized, capacity = dtypes[1] != dtype, tokens * (1 if sizes.table is None else sizes.table[0])
    rows = min(_most_rows(device), max(16, next_power_of_2(LQ * H)))
    config = dict(CONFIGS(device, dtype.itemsize, quantized, rows))  # type: ignore[union-attr]
    programs, block_n = config.pop("per_sm") * gpu_facts(device).sms, config["BLOCK_N"]
    shared = cdiv(LQ * H, config["BLOCK_M"])  # programs of a slot
    splits = plan_splits(B, shared, capacity, block_n, programs, options.num_splits)
    block_b = next_power_of_2(B) if splits.is_split else 1
    attend_slots = LAUNCHERS["mla"].prepare(
        (splits.slots * shared,),
        *sizes.q_strides[:3], *sizes.strides, 0 if sizes.table is None else sizes.table[1], B, LQ, capacity, pages,
        splits.programs, splits.chunk, options.scale * LOG2_E.value,
        H=H, PAGE=0 if sizes.table is None else tokens, GROUP=GROUP, ROPE=ROPE, QUANTIZED=quantized,
        BLOCK_B=block_b, MIN_CHUNK=MIN_CHUNK, CAUSAL=options.causal, SPLIT=splits.is_split,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        PDL=splits.is_split and has_pdl(device), **config,
    )  # fmt: skip
    combine = LAUNCHERS["combine"].prepare(
        (B * LQ * H,),
        B, 1, LQ, capacity, 0, 0, splits.programs, splits.chunk, LATENT,
        G=H, BLOCK_B=block_b, BLOCK_N=block_n, BLOCK_S=COMBINED_AT_ONCE, BLOCK_D=LATENT, MIN_CHUNK=MIN_CHUNK,
        HAS_WINDOW=False, num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    partials = splits.slots * LQ * H

    def run(q: Tensor, parts: Latents, lengths: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = _empty_outputs(q)
        if not splits.is_split:
            attend_slots(q, *parts, lengths, table, out, lse)
            return out, lse
        partial = torch.empty((partials, LATENT), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(partials, dtype=torch.float32, device=q.device)
        attend_slots(q, *parts, lengths, table, partial, partial_lse)
        combine(partial, partial_lse, lengths, None, out, lse)
        return out, lse

    return run


def _empty_outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], LATENT)), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("mla_decode", fake=_empty_outputs)
def mla_forward(
    q: Tensor, kv_cache: Tensor, lengths: Tensor, block_table: Tensor | None, options: MLA
) -> tuple[Tensor, Tensor]:
    """The output [B, LQ, H, 512] and the log-sum-exp [B, LQ, H]. No tensor may be empty."""
    q, lengths = q if q.stride(-1) == 1 else q.contiguous(), lengths.contiguous()
    if kv_cache.stride(-1) != 1 or (kv_cache.dtype == torch.uint8 and not _is_aligned(kv_cache)):
        kv_cache = kv_cache.clone(memory_format=torch.contiguous_format)
    parts = split(kv_cache)
    strides = tuple(s for x in parts for s in ((0, 0) if x is None else x.stride()[:2]))
    table = None
    if block_table is not None:
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        table = block_table.shape[1], block_table.stride(0)
    sizes = _Sizes(tuple(q.shape), q.stride(), tuple(kv_cache.shape), strides, table)
    dtypes = tuple(None if x is None else x.dtype for x in (q, parts.latent, lengths, block_table))
    return _plan(options, sizes, dtypes, q.get_device())(q, parts, lengths, block_table)


def _is_aligned(packed: Tensor) -> bool:
    """Return whether bytes can be viewed as float32."""
    return all(stride % 4 == 0 for stride in (*packed.stride()[:-1], packed.storage_offset()))


def _fits(q: Tensor, kv_cache: Tensor, *_: Any) -> bool:
    # Scales multiply the probabilities, and float16 has too few exponents for the product.
    return kv_cache.dtype != torch.uint8 or (has_fp8(q.get_device()) and q.dtype != torch.float16)


@op.kernel("triton", language="triton", fits=_fits)
def triton_mla_decode(
    q: Tensor, kv_cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float, causal: bool, tokens: int
) -> tuple[Tensor, Tensor]:
    return mla_forward(q, kv_cache, lengths, block_table, MLA(scale, causal, 0))


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention of the last tokens of sequences, in the absorbed form. Not measured yet.

    q is [B, LQ, H, 576]: 512 numbers for the latent vector and 64 for its rotary part. The cache is [B,
    capacity, 576] or, with a block_table [B, pages per sequence], [pages, page, 576]; or bytes in the quantized layout,
    uint8 or float8_e4m3fn with 656 per token: 512 float8_e4m3fn, 4 float32 scales, 64 bfloat16. lengths [B] counts the
    cached tokens of each sequence, and is read on the GPU alone; the queries belong to the last LQ.

    The result is [B, LQ, H, 512]; a query that sees no token has zeros and a log-sum-exp of -inf. `scale` is that of
    the expanded heads, by default 1 / sqrt(576). num_splits fixes how many programs share a sequence, and
    return_lse=True also returns the log-sum-exp of the scores, float32 [B, LQ, H].
    """
    kv_cache = _checked(q, kv_cache)
    check_tables(lengths, block_table, q)
    page, pages = kv_cache.shape[1], kv_cache.shape[0]
    expected = block_table is not None or pages == q.shape[0]
    require(expected, f"the cache must hold {q.shape[0]} sequences, as many as q, not {pages}")
    check_lengths(lengths, page * (1 if block_table is None else block_table.shape[1]), 0, block_table, page, pages)
    check_splits(num_splits)
    scale = WIDTH**-0.5 if scale is None else float(scale)
    fits = q.numel() and _fits(q, kv_cache)
    if fits and is_eligible(q, kv_cache, lengths, block_table):
        out, lse = mla_forward(q, kv_cache, lengths, block_table, MLA(scale, causal, num_splits or 0))
    else:
        out, lse = reference(q, kv_cache, lengths, block_table, scale, causal, 0)
    return (out, lse) if return_lse else out


def _checked(q: Tensor, kv_cache: Tensor) -> Tensor:
    """Return the cache as [pages, tokens, width], of q's dtype or bytes; raise where it does not belong to q."""
    require_tensor("q", q, q)
    require_tensor("kv_cache", kv_cache, q)
    require(q.dim() == 4 and q.shape[3] == WIDTH, f"q must be [B, LQ, H, {WIDTH}], not {[*q.shape]}")
    if kv_cache.dim() == 4 and kv_cache.shape[2] == 1:
        kv_cache = kv_cache.squeeze(2)
    if kv_cache.dtype in (torch.uint8, torch.float8_e4m3fn):
        is_packed = kv_cache.dim() == 3 and kv_cache.shape[2] == PACKED_WIDTH
        require(is_packed, f"a quantized cache must be [pages, tokens, {PACKED_WIDTH}] bytes, not {[*kv_cache.shape]}")
        return kv_cache.view(torch.uint8)
    is_plain = kv_cache.dim() == 3 and kv_cache.shape[2] == WIDTH
    require(is_plain, f"the cache must be [pages, tokens, {WIDTH}], not {[*kv_cache.shape]}")
    is_same = kv_cache.dtype == q.dtype
    require(is_same, f"the cache must have the dtype of q, {q.dtype}, or be bytes, not {kv_cache.dtype}", TypeError)
    return kv_cache


@op.public
def public(
    q: Tensor, kv_cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float, causal: bool, tokens: int
) -> tuple[Tensor, Tensor]:
    return mla_decode(q, kv_cache, lengths, block_table, scale=scale, causal=causal, return_lse=True)  # type: ignore[return-value]
