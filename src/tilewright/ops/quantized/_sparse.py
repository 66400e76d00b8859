"""2:4 sparsity: at most two of four consecutive weights of a row are not zero; and its Triton kernel for decoding.

The two kept values and their places take 9 of 16 bits, so a layer that is memory-bound at decoding reads 56 % of the
bytes. The kernel expands the weights in registers; the sparse tensor cores, which skip zeros, are cuSPARSELt's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.quantized._triton import SUM_BLOCK, _launch_sum
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.gpus import GPUFacts
from tilewright.runtime.launch import Launcher
from tilewright.runtime.pdl import dependent_launch, has_pdl, launch_dependents
from tilewright.runtime.sizes import cdiv, next_power_of_2

CHUNK = 128  # columns that are stored together
KEPT = CHUNK // 2  # values of a chunk


def magnitude_mask(weight: Tensor) -> Tensor:
    """Return which weights are among the two largest of their four, the first ones of equal magnitudes."""
    K = weight.shape[1]
    fours = torch.nn.functional.pad(weight.detach().abs(), (0, -K % 4)).unflatten(1, (-1, 4))
    best = fours.sort(dim=-1, descending=True, stable=True)[1][..., :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, best, True).flatten(1)[:, :K]


def is_2_of_4(mask: Tensor) -> bool:
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 4))
    return bool((padded.unflatten(1, (-1, 4)).sum(-1) <= 2).all())


# Storage. The tensor cores' fragment gives lane c of four the columns 2c and 2c + 1 of every 8. The product may take
# columns in any order, so a lane gets whole groups of four: group 4 B + c fills its pairs in blocks 2B and 2B + 1. The
# values of a chunk are ordered by lane, B and place; the places of a lane's eight groups are one int32.


def compress(weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [N, chunks * 64] and places, int32 [N, chunks * 4], of a weight [N, K] with a 2:4 mask."""
    N, K = weight.shape
    pad = (0, -K % CHUNK)
    fours = torch.nn.functional.pad(torch.where(mask, weight, 0.0), pad).view(
        N, -1, 8, 4, 4
    )  # [N, chunk, B, lane, place]
    kept = torch.nn.functional.pad(mask, pad).view(fours.shape)
    # Kept places first, in order; places that are not kept hold zeros and fill up.
    order = kept.byte().sort(dim=-1, descending=True, stable=True)[1][..., :2].sort(-1)[0]
    values = fours.gather(-1, order).transpose(2, 3)
    places = (order[..., 0] | order[..., 1] << 2).transpose(2, 3)  # [N, chunk, lane, B]
    shifts = torch.arange(0, 32, 4, device=weight.device)
    words = (places << shifts).sum(-1).to(torch.int32)  # the sum wraps around to the bits of the word
    return values.reshape(N, -1), words.view(N, -1)


def expand(values: Tensor, places: Tensor, K: int) -> Tensor:
    """Return the weight [N, K] of compressed parts."""
    N = values.shape[0]
    shifts = torch.arange(0, 32, 4, device=places.device)
    codes = places.view(N, -1, 4, 1) >> shifts & 15  # [N, chunk, lane, B]
    order = torch.stack((codes & 3, codes >> 2), -1).long()
    fours = values.new_zeros(*codes.shape, 4).scatter(-1, order, values.reshape(order.shape))
    return fours.transpose(2, 3).reshape(N, -1)[:, :K]


@triton.jit
def _sparse_linear_fwd(
    x_ptr, values_ptr, places_ptr, bias_ptr, y_ptr, stride_xm, M, N, K, chunks_per_split,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y = x wᵀ + bias, or of the partial sums [splits, M, N] of one part of K."""
    launch_dependents(PDL)
    tiles_m = tl.cdiv(M, BLOCK_M)
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_m, rows_n = (offs_m % M).to(tl.int64), (offs_n % N).to(tl.int64)  # rows past the end are never stored
    chunks = tl.cdiv(K, 128)
    first = tl.program_id(1) * chunks_per_split
    last = tl.minimum(first + chunks_per_split, chunks)

    # Place 16 B + 8 b + 2 lane + h of the product is column 16 B + 4 lane + 2 b + h.
    place = tl.arange(0, 128)
    offs_k = place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2
    x_ptrs = x_ptr + rows_m[None, :] * stride_xm + (first * 128 + offs_k)[:, None]
    values_ptrs = values_ptr + rows_n[:, None] * (chunks * 64) + first * 64 + tl.arange(0, 64)[None, :]
    places_ptrs = places_ptr + rows_n[:, None] * (chunks * 4) + first * 4 + tl.arange(0, 4)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(first, last):
        x = tl.load(x_ptrs) if EVEN_K else tl.load(x_ptrs, mask=(offs_k < K - chunk * 128)[:, None], other=0.0)
        values, places = tl.load(values_ptrs), tl.load(places_ptrs)
        one, two = tl.split(values.reshape(BLOCK_N, 4, 8, 2))  # row, lane, B
        codes = places[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]
        at_one, at_two = codes & 3, (codes >> 2) & 3
        w0 = tl.where(at_one == 0, one, tl.zeros_like(one))  # the second place is never 0
        w1 = tl.where(at_one == 1, one, tl.where(at_two == 1, two, tl.zeros_like(two)))
        w2 = tl.where(at_one == 2, one, tl.where(at_two == 2, two, tl.zeros_like(two)))
        w3 = tl.where(at_two == 3, two, tl.zeros_like(two))  # nor is the first one 3
        w = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # row, lane, B, b, h
        w = w.permute(0, 2, 3, 1, 4).reshape(BLOCK_N, 128)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        x_ptrs += 128
        values_ptrs += 64
        places_ptrs += 4

    inside = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    offs = offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]  # [BLOCK_N, BLOCK_M]
    if SPLIT:
        tl.store(y_ptr + tl.program_id(1).to(tl.int64) * M * N + offs, acc, mask=inside)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=inside)


def _default_config(gpu: GPUFacts, rows: int, N: int, K: int, itemsize: int) -> Config:
    """Return the configuration for up to `rows` rows of x. Not timed."""
    block_m = min(rows, 32 if itemsize == 4 else 64)
    block_n = 32 if itemsize == 4 else 64
    tiles = cdiv(N, block_n) * cdiv(rows, block_m)
    splits = max(1, min(4 * gpu.sms // tiles, cdiv(K, CHUNK) // 4))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "splits": splits, "num_warps": 4, "num_stages": 2}


def _choices(gpu: GPUFacts, rows: int, N: int, K: int, itemsize: int) -> list[Config]:
    config = _default_config(gpu, rows, N, K, itemsize)
    found = [
        config | {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages, "splits": splits}
        for block_n, warps in ((32, 2), (64, 4), (128, 8))
        for stages in (2, 3, 4)
        for splits in (1, 2, 4, 8)
        if splits == 1 or cdiv(K, CHUNK) // splits >= 4
    ]
    return [config, *(one for one in found if one != config)]


CONFIGS = ConfigTable("sparse_linear.json", _default_config, _choices, takes_gpu=True)
_launch_fwd = Launcher(_sparse_linear_fwd)


@cached_plan
def _plan(
    sizes: tuple[int, int, int], stride: int, dtype: torch.dtype, device: int, has_bias: bool
) -> tuple[Any, Any, int]:
    """Return the launches of the product and of the sum of its splits, and the number of splits."""
    M, N, K = sizes
    config = dict(CONFIGS(device, max(16, next_power_of_2(min(M, 256))), N, K, dtype.itemsize))
    chunks = cdiv(K, CHUNK)
    per_split = cdiv(chunks, config.pop("splits"))
    splits = cdiv(chunks, per_split)
    fwd = _launch_fwd.prepare(
        (cdiv(M, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"]), splits), stride, M, N, K, per_split,
        EVEN_K=K % CHUNK == 0, SPLIT=splits > 1, PDL=splits > 1 and has_pdl(device), **config,
    )  # fmt: skip
    summed = _launch_sum.prepare(
        (cdiv(M * N, SUM_BLOCK),), M * N, N, splits,
        ACTIVATION="none", BLOCK=SUM_BLOCK, num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return fwd, summed, splits


def linear(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    """Return x wᵀ + bias for x [M, K] whose rows are contiguous."""
    (M, K), N = x.shape, values.shape[0]
    y = x.new_empty(M, N)
    fwd, summed, splits = _plan((M, N, K), x.stride(0), x.dtype, x.get_device(), bias is not None)
    if splits == 1:
        fwd(x, values, places, bias, y)
        return y
    partials = x.new_empty(splits, M, N, dtype=torch.float32)
    fwd(x, values, places, None, partials)
    summed(partials, bias, y)
    return y
