"""Attention of new tokens against a KV cache, contiguous or paged: decoding, and prefill in chunks.

Decoding reads every cached key and value once and does little with them, so the kernel must keep memory busy. The query
heads that share a key head stand in the rows of one tile, and the tokens of each sequence are divided among programs,
whose results a second kernel combines. The number of programs depends on shapes alone and the chunk each takes on the
lengths, which only the GPU reads: a CUDA graph can be replayed with other lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.decode._append import Append, append_in_torch, append_kv, is_fp8
from tilewright.ops.decode._reference import attend, dense, token_major
from tilewright.ops.decode._splits import LOG2_E, MIN_CHUNK, plan_splits
from tilewright.ops.decode._triton import _combine_fwd, _decode_fwd
from tilewright.ops.decode._validate import check_cache, check_lengths, check_splits, is_eligible, per_head, require
from tilewright.ops.rope import reference as rotate
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.gpus import GPUFacts, gpu_facts, has_fp8
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.pdl import dependent_launch, has_pdl
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Case, Cost, Draw, Op, matrix_unit, points

__all__ = ["decode_attention"]

MAX_HEAD = 256


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    layout: str,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    k, v = (dense(cache, lengths, block_table, layout) for cache in (k_cache, v_cache))
    return attend(
        q, k, v, lengths, scale, causal=causal, window=window, softcap=softcap, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip


def cost(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *others: Any) -> Cost:
    """Count `tokens`, the sum over the sequences of the tokens that some query sees; lengths have no values here."""
    *rest, tokens = others
    (B, LQ, H, D), HKV = q.shape, token_major(k_cache, rest[-1]).shape[2]
    lse = 4 * B * LQ * H
    scores = tokens * LQ * H
    tables = sum(x.nbytes for x in (lengths, rest[0]) if x is not None)
    return Cost(
        read=q.nbytes + tables + tokens * HKV * D * (k_cache.element_size() + v_cache.element_size()),
        written=q.nbytes + lse,
        flops={matrix_unit(q.dtype): 4 * scores * D, "special": scores},
    )


def case_lengths(B: int, T: int, ragged: bool) -> list[int]:
    """Return the lengths of a case: all T, or evenly from T down to 0."""
    return [T * (B - 1 - b) // (B - 1) if ragged and B > 1 else T for b in range(B)]


def case_pages(draw: Draw, lengths: Tensor) -> tuple[int, Tensor | None]:
    """Return the number of pages and a block table in random order, with garbage past the lengths; None if contiguous.

    Sequence 1 shares the first page of sequence 0, as if both began with the same prompt.
    """
    B, T, page = draw["B"], draw["T"], draw["page"]
    if not page:
        return B, None
    each = cdiv(T, page)
    order = draw.randint(B * each + 1, high=2**30).argsort()[: B * each].view(B, each)
    if B > 1 and each:
        order[1, 0] = order[0, 0]
    is_used = torch.arange(each, device=lengths.device) * page < lengths[:, None]
    return B * each + 1, torch.where(is_used, order, -(2**31)).int()


def _inputs(draw: Draw) -> tuple[Any, ...]:
    B, T, LQ, HKV, D, page = (draw[name] for name in ("B", "T", "LQ", "HKV", "D", "page"))
    known = case_lengths(B, T, draw["ragged"])
    lengths = torch.tensor(known, dtype=torch.int32, device=draw.device)
    pages, table = case_pages(draw, lengths)
    shape = (pages, page or T, HKV, D) if draw["layout"] == "NHD" else (pages, HKV, page or T, D)
    quantized = draw["cache"] == "fp8"
    dtype = torch.float8_e4m3fn if quantized else draw.dtype
    caches = [draw.randn(*shape, dtype=dtype) for _ in range(2)]
    scales = [draw.randn("HKV", dtype=torch.float32) if quantized else None for _ in range(2)]
    sinks = draw.randn("H") if draw["sinks"] else None
    seen = [min(n, draw["window"] + LQ - 1) if draw["window"] else n for n in known]
    softcap = 20.0 if draw["softcap"] else 0.0
    return (
        draw.randn("B", "LQ", "H", "D"), *caches, lengths, table, sinks, *scales, D**-0.5, draw["causal"],
        draw["window"], softcap, draw["layout"], sum(seen),
    )  # fmt: skip


def _takes(case: Case) -> bool:
    B, H, HKV, T, LQ, D = (int(case[name]) for name in ("B", "H", "HKV", "T", "LQ", "D"))
    return (
        min(B, HKV, T, LQ) > 0 and H % HKV == 0 and 0 < D <= MAX_HEAD and (bool(case["causal"]) or not case["window"])
    )


op = Op(
    "decode_attention",
    reference,
    cost,
    inputs=_inputs,
    # The largest small case, which `check` varies, has one query per sequence and no sink: a NaN that some queries of
    # a tile do not see reaches them too, as zero times NaN, in any matrix product.
    check=points(
        B=(1, 3, 2, 4, 2, 3, 2, 1),
        H=(1, 4, 4, 8, 6, 4, 4, 2),
        HKV=(1, 2, 2, 1, 6, 2, 1, 2),
        LQ=(1, 1, 1, 2, 3, 1, 40, 16),
        T=(1, 37, 100, 600, 130, 333, 300, 300),
        D=(16, 16, 32, 8, 25, 64, 64, 128),
        page=(0, 16, 16, 16, 0, 64, 32, 0),
        layout=("NHD", "NHD", "NHD", "HND", "HND", "NHD", "NHD", "HND"),
        cache=("same", "same", "same", "same", "same", "fp8", "same", "same"),
        ragged=(False, True, True, True, True, True, False, False),
        causal=(True, True, True, True, False, True, True, True),
        window=(0, 0, 0, 0, 0, 0, 20, 0),
        softcap=(False, False, False, True, False, False, False, False),
        sinks=(False, False, False, True, False, False, True, False),
    ),
    bench=points(
        B=(1, 16, 64, 8, 16, 16, 16, 16, 1),
        H=(32,) * 9,
        HKV=(8,) * 9,
        LQ=(1, 1, 1, 1, 1, 1, 1, 1, 2048),
        T=(32768, 32768, 32768, 65536, 32768, 32768, 32768, 32768, 32768),
        D=(128,) * 9,
        page=(0, 0, 0, 0, 16, 64, 128, 0, 64),
        layout=("NHD",) * 9,
        cache=("same",) * 7 + ("fp8", "same"),
        ragged=(False, False, False, True, False, False, False, False, False),
        causal=(True,) * 9,
        window=(0,) * 9,
        softcap=(False,) * 9,
        sinks=(False,) * 9,
    ),
    takes=_takes,
    batch="B",
)


class Decode(NamedTuple):
    """The options of a call."""

    scale: float
    causal: bool
    window: int  # 0: none
    softcap: float  # 0: none
    layout: str
    interleaved: bool  # pairs of the rotary embedding
    num_splits: int  # 0: as many as keep the GPU busy
    added: int  # tokens that follow those of `lengths`


class _Sizes(NamedTuple):
    """The part of a plan's key that shapes and strides decide."""

    q: tuple[int, ...]
    q_strides: tuple[int, ...]
    cache: tuple[int, ...]  # [pages, tokens, heads, D]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    table: tuple[int, int] | None  # pages per sequence, stride of a sequence
    angles: tuple[int, int]

    @property
    def capacity(self) -> int:
        """The tokens that a sequence can have."""
        return self.cache[1] * (1 if self.table is None else self.table[0])


SHARED_SHARE = 0.45  # for tiles in flight, of the shared memory of a block, so that two blocks share an SM


def _default(gpu: GPUFacts, size: int, cache_size: int, head: int, rows: int, pages: str) -> Config:
    block_n = 64 if head * size <= 256 else 32 if head * size <= 512 and size == 2 else 16
    fitting = int(gpu.shared_per_block * SHARED_SHARE) // (2 * block_n * head * max(size, cache_size))
    # The operands of an fp32 GEMM are in registers: twice the warps.
    return {"BLOCK_N": block_n, "num_warps": 2 * size, "num_stages": _stages(min(2, fitting), pages), "per_sm": 2}


def _stages(buffers: int, pages: str) -> int:
    """Return Triton's num_stages for this number of tiles in flight. Each load of a chain of two gets half of them."""
    return 1 + buffers * (2 if pages == "paged" else 1)


def _choices(gpu: GPUFacts, size: int, cache_size: int, head: int, rows: int, pages: str) -> list[Config]:
    return [
        {"BLOCK_N": n, "num_warps": warps, "num_stages": _stages(buffers, pages), "per_sm": programs}
        for n in (32, 64, 128)
        for warps in (4, 8)
        for buffers in (0, 1, 2, 3)
        for programs in (1, 2, 4)
        if max(1, buffers) * 2 * n * head * size <= gpu.shared_per_block
    ]


CONFIGS = ConfigTable("decode.json", _default, _choices, takes_gpu=True)
LAUNCHERS = {"decode": Launcher(_decode_fwd), "combine": Launcher(_combine_fwd)}
COMBINED_AT_ONCE = 16  # slots that a program of the combine loads at a time


@cached_plan
def _plan(
    options: Decode, sizes: _Sizes, dtypes: tuple[torch.dtype | None, ...], device: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that takes the tensors of a call, launches, and returns the output and the log-sum-exp."""
    (B, LQ, H, D), (pages, tokens, HKV, _) = sizes.q, sizes.cache
    group, capacity, dtype = H // HKV, sizes.capacity, dtypes[0]
    block_d, size = max(16, next_power_of_2(D)), dtype.itemsize  # type: ignore[union-attr]
    block_m = min(max(16, next_power_of_2(LQ * group)), 64 if size * block_d <= 256 else 32)
    kind = "contiguous" if sizes.table is None else "paged"
    config = dict(CONFIGS(device, size, dtypes[1].itemsize, block_d, block_m, kind))  # type: ignore[union-attr]
    programs, block_n = config.pop("per_sm") * gpu_facts(device).sms, config["BLOCK_N"]
    window = min(options.window, capacity)
    span = min(capacity, window + LQ - 1 + block_n) if window else capacity
    splits = plan_splits(B, HKV * cdiv(LQ * group, block_m), span, block_n, programs, options.num_splits)
    log2_e = LOG2_E.value
    block_b = next_power_of_2(B) if splits.is_split else 1
    attend_slots = LAUNCHERS["decode"].prepare(
        (splits.slots * HKV * cdiv(LQ * group, block_m),),
        *sizes.q_strides[:3], *sizes.k_strides[:3], *sizes.v_strides[:3], 0 if sizes.table is None else sizes.table[1],
        B, HKV, LQ, capacity, options.added, pages, window, splits.programs, splits.chunk, D, sizes.angles[1],
        sizes.angles[0], options.scale * log2_e, options.softcap * log2_e,
        G=group, PAGE=0 if sizes.table is None else tokens, BLOCK_B=block_b, BLOCK_M=block_m, BLOCK_D=block_d,
        MIN_CHUNK=MIN_CHUNK, CAUSAL=options.causal, SPLIT=splits.is_split, EVEN_D=block_d == D,
        HAS_SOFTCAP=options.softcap > 0, HAS_WINDOW=window > 0, INTERLEAVED=options.interleaved,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        PDL=splits.is_split and has_pdl(device), **config,
    )  # fmt: skip
    combine = LAUNCHERS["combine"].prepare(
        (B * LQ * H,),
        B, HKV, LQ, capacity, options.added, window, splits.programs, splits.chunk, D,
        G=group, BLOCK_B=block_b, BLOCK_N=block_n, BLOCK_S=COMBINED_AT_ONCE, BLOCK_D=block_d, MIN_CHUNK=MIN_CHUNK,
        HAS_WINDOW=window > 0, num_warps=4 if block_d > 64 else 2, **dependent_launch(device),
    )  # fmt: skip
    rows = splits.slots * LQ * H

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, sinks: Tensor | None, *others: Any):
        out, lse = _empty_outputs(q)
        if not splits.is_split:
            attend_slots(q, k, v, lengths, table, sinks, *others, out, lse)
            return out, lse
        partial = torch.empty((rows, D), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        attend_slots(q, k, v, lengths, table, sinks, *others, partial, partial_lse)
        combine(partial, partial_lse, lengths, sinks, out, lse)
        return out, lse

    return run


def _empty_outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return contiguous_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("decode_attention", fake=_empty_outputs)
def decode_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Decode,
) -> tuple[Tensor, Tensor]:
    """The output [B, LQ, H, D] and the log-sum-exp [B, LQ, H]. No tensor may be empty."""
    q, lengths = q if q.stride(-1) == 1 else q.contiguous(), lengths.contiguous()
    k, v = (token_major(x, options.layout) for x in (k_cache, v_cache))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    table = None if block_table is None else (block_table.shape[1], block_table.stride(0))
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
        table = block_table.shape[1], block_table.stride(0)
    small = [None if x is None else x.contiguous() for x in (sinks, k_scale, v_scale, cos, sin)]
    angles = (0, 0) if cos is None else (cos.shape[0], cos.shape[1])
    sizes = _Sizes(tuple(q.shape), q.stride(), tuple(k.shape), k.stride(), v.stride(), table, angles)
    dtypes = tuple(None if x is None else x.dtype for x in (q, k, lengths, block_table, *small))
    return _plan(options, sizes, dtypes, q.get_device())(q, k, v, lengths, block_table, *small)


def _fits(q: Tensor, k_cache: Tensor, *_: Any) -> bool:
    return q.numel() > 0 and (has_fp8(q.get_device()) or not is_fp8(k_cache.dtype))


@op.kernel("triton", language="triton", fits=_fits)
def triton_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    layout: str,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    options = Decode(scale, causal, window, softcap, layout, False, 0, 0)
    return decode_forward(q, k_cache, v_cache, lengths, block_table, sinks, k_scale, v_scale, None, None, options)


@op.also
def append_rotated_tokens(device: str) -> None:
    k_cache = torch.empty(1024, 64, 8, 128, dtype=torch.bfloat16, device=device)
    new = torch.empty(16, 1, 8, 128, dtype=torch.bfloat16, device=device)
    lengths = torch.empty(16, dtype=torch.int32, device=device)
    table = torch.empty(16, 64, dtype=torch.int32, device=device)
    angles = torch.empty(4096, 64, dtype=torch.bfloat16, device=device)
    tables = (lengths, table, None, None, angles, angles)
    append_kv(new, new, k_cache, k_cache, *tables, Append("NHD", True))


@op.also
def decode_rotated_tokens_in_a_window(device: str) -> None:
    q = torch.empty(16, 4, 32, 128, dtype=torch.bfloat16, device=device)
    k_cache = torch.empty(16, 8, 4096, 128, dtype=torch.bfloat16, device=device)
    lengths, sinks = torch.empty(16, dtype=torch.int32, device=device), torch.empty(32, device=device)
    angles = torch.empty(4096, 64, dtype=torch.bfloat16, device=device)
    options = Decode(0.1, True, 1024, 20.0, "HND", True, 0, 0)
    decode_forward(q, k_cache, k_cache, lengths, None, sinks, None, None, angles, angles, options)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last tokens of sequences against a KV cache.

    q is [B, LQ, H, D]; the caches are [B, capacity, HKV, D] or, with layout="HND", [B, HKV, capacity, D]. With a
    block_table [B, pages per sequence] they are [pages, page, HKV, D] or [pages, HKV, page, D], where H is a multiple
    of HKV. lengths [B] counts the cached tokens of each sequence, and is read on the GPU alone; the queries belong
    to the last LQ of them, and each sees the tokens up to its own (causal), at most `window` of them. A query that sees
    no token has an output of zeros and a log-sum-exp of -inf.

    sinks [H] are scores that take part in the softmax without a value, and softcap c replaces a score s by c tanh(s /
    c). Caches may be float8, with a factor per head, k_scale and v_scale [HKV].

    With k_new and v_new [B, LNEW, HKV, D], these are written to the caches first, after the `lengths` tokens that they
    have already. With rotary_cos and rotary_sin [positions, R], q and k_new are rotated by their positions; the cached
    keys are already rotated.

    num_splits fixes how many programs share a sequence, and so makes its result independent of the other sequences.
    return_lse=True also returns the log-sum-exp of the scores, float32 [B, LQ, H].
    """
    HKV = check_cache(q, k_cache, v_cache, lengths, block_table, layout)
    capacity = token_major(k_cache, layout).shape[1] * (1 if block_table is None else block_table.shape[1])
    added = _check_new(q, k_cache, k_new, v_new, HKV)
    require(causal or window is None, "a window needs causal=True")
    require(window is None or window > 0, "window must be a positive number of tokens")
    require(softcap is None or softcap > 0, "softcap must be positive")
    check_splits(num_splits)
    require((rotary_cos is None) == (rotary_sin is None), "rotary_cos and rotary_sin belong together")
    require(rotary_cos is None or causal, "rotary embedding needs causal=True, which places the queries")
    if rotary_cos is not None and rotary_sin is not None:
        R = rotary_cos.shape[-1]
        is_table = rotary_cos.dim() == 2 and rotary_cos.shape == rotary_sin.shape and 0 < 2 * R <= q.shape[3]
        require(is_table, f"rotary_cos and rotary_sin must be [positions, at most {q.shape[3] // 2} pairs]")
    page, pages = token_major(k_cache, layout).shape[1], k_cache.shape[0]
    check_lengths(lengths, capacity, added, block_table, page, pages, rotary_cos)
    require(sinks is None or sinks.shape == q.shape[2:3], f"sinks must be [{q.shape[2]}], one per query head")
    k_factor, v_factor = per_head("k_scale", k_scale, HKV, q), per_head("v_scale", v_scale, HKV, q)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tensors = (sinks, k_factor, v_factor, rotary_cos, rotary_sin, k_new, v_new, block_table, lengths)
    is_ours = q.shape[3] <= MAX_HEAD and q.numel() and is_eligible(q, k_cache, v_cache, *tensors)
    if k_new is not None and v_new is not None:
        write = append_kv if is_ours else append_in_torch
        tables = (block_table, k_factor, v_factor, rotary_cos, rotary_sin)
        write(k_new, v_new, k_cache, v_cache, lengths, *tables, Append(layout, rotary_interleaved))
    options = Decode(scale, causal, window or 0, softcap or 0.0, layout, rotary_interleaved, num_splits or 0, added)
    if is_ours:
        out, lse = decode_forward(
            q, k_cache, v_cache, lengths, block_table, sinks, k_factor, v_factor, rotary_cos, rotary_sin, options
        )
    else:
        lengths = lengths + added
        if rotary_cos is not None:
            at = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=lengths.device)
            q = rotate(q, q[:, :, :0], rotary_cos, rotary_sin, at.clamp_min(0).long(), rotary_interleaved)[0]  # type: ignore[arg-type]
        out, lse = reference(
            q, k_cache, v_cache, lengths, block_table, sinks, k_factor, v_factor, scale, causal, window or 0,
            softcap or 0.0, layout, 0,
        )  # fmt: skip
    return (out, lse) if return_lse else out


@op.public
def public(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    layout: str,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    return decode_attention(  # type: ignore[return-value]
        q, k_cache, v_cache, lengths, block_table, scale=scale, causal=causal, window=window or None, sinks=sinks,
        softcap=softcap or None, layout=layout, k_scale=k_scale, v_scale=v_scale, return_lse=True,
    )  # fmt: skip


def _check_new(q: Tensor, k_cache: Tensor, k_new: Tensor | None, v_new: Tensor | None, HKV: int) -> int:
    """Return the number of new tokens per sequence."""
    require((k_new is None) == (v_new is None), "k_new and v_new belong together")
    if k_new is None or v_new is None:
        return 0
    wanted = (q.shape[0], k_new.shape[1] if k_new.dim() == 4 else -1, HKV, q.shape[3])
    is_right = tuple(k_new.shape) == tuple(v_new.shape) == wanted
    require(is_right, f"k_new and v_new must be [{wanted[0]}, new tokens, {HKV}, {wanted[3]}], not {[*k_new.shape]}")
    require(
        k_new.dtype == q.dtype, f"k_new and v_new must have the dtype of q, {q.dtype}, not {k_new.dtype}", TypeError
    )
    return k_new.shape[1]
