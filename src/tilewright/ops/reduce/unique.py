"""The unique values of a tensor in ascending order, their counts, and the index of each element's value.

Nothing is sorted. Each value has a bin: 8 or 16 bits have at most 65536 values, and wider integers often span a small
range. One pass over the input fills the bins, the nonempty ones are ranked in order, and a second pass looks up the
rank of each element. There are several copies of the bins, since most data fall into few of them, where the atomics of
many programs would contend. Only integers are added, so results are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.crossovers import Crossover, faster_after, never
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.gpus import GPUFacts
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Op, points

__all__ = ["unique"]

NARROW = (torch.bfloat16, torch.float16, torch.int16, torch.int8, torch.uint8, torch.bool)
WIDE = (torch.int32, torch.int64)  # if they span a small range
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.bool: torch.uint8}  # views as integers
INFINITIES = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # as bits; larger magnitudes are NaN
MAX_BINS = 2**22  # 16 MiB: they stay in L2
TILE = 8192  # bins that one program sums per step, over all copies
MAX_COPIES = 64  # per tile


def reference(x: Tensor, inverse: bool) -> tuple[Tensor, ...]:
    if x.is_meta:  # the number of values depends on the data
        return x.new_empty(0), *[x.new_empty(x.shape, dtype=torch.int64)] * inverse, x.new_empty(0, dtype=torch.int64)
    return torch.unique(x, return_inverse=inverse, return_counts=True)


def cost(x: Tensor, inverse: bool) -> Cost:
    """Return the cost without values and counts, whose number depends on the data."""
    written = x.numel() * torch.int64.itemsize if inverse else 0
    return Cost(read=x.nbytes, written=written)


op = Op(
    "unique",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N", scale=float(draw["spread"])), draw["inverse"]),
    check=points(
        N=(1, 2, 5, 193, 781, 20011, 9001, 70001),
        spread=(1, 1, 100, 1, 30, 9000, 1, 40),
        inverse=(True, False, True, True, True, True, False, True),
    ),
    bench=points(N=(2**28, 2**28, 2**28, 2**26), spread=(1000, 1, 1000, 1000), inverse=(False, False, True, True)),
    dtypes=("int16", "int32", "int64"),  # not floats: rounding them changes which are equal, so no error budget applies
    bench_dtypes=("int16",),
)


@triton.jit
def _bin(x, low_ptr, LOW: tl.constexpr, INFINITY: tl.constexpr):
    """Return the bin of each element, in the order of values. NaN has the last one, -0.0 that of 0.0."""
    if INFINITY is not None:  # x holds the bits of floats
        magnitude = x.to(tl.int32) & 0x7FFF
        bin_ = tl.where(x < 0, 0x8000 - magnitude, 0x8000 + magnitude)
        return tl.where(magnitude > INFINITY, 0xFFFF, bin_)
    elif LOW is not None:
        return x.to(tl.int32) - LOW
    else:
        return (x - tl.load(low_ptr)).to(tl.int32)


@triton.jit
def _value(bin_, low_ptr, LOW: tl.constexpr, INFINITY: tl.constexpr):
    """Return the value of each bin."""
    if INFINITY is not None:
        return tl.where(bin_ < 0x8000, -bin_, bin_ - 0x8000)  # as int16: sign bit and magnitude
    elif LOW is not None:
        return bin_ + LOW
    else:
        return bin_ + tl.load(low_ptr)


@triton.jit
def _mark(table_ptr, count, bin_, inside, MODE: tl.constexpr, MASKED: tl.constexpr):
    if MODE == "histogram":
        count += tl.histogram(bin_, 256, mask=inside if MASKED else None)
    elif MODE == "count":
        tl.atomic_add(table_ptr + bin_, 1, mask=inside if MASKED else None, sem="relaxed")
    else:  # seen: a load saves most stores, and no other program has this copy
        is_new = tl.load(table_ptr + bin_, mask=inside if MASKED else None, other=1 if MASKED else None) == 0
        tl.store(table_ptr + bin_, 1, mask=is_new)
    return count


@triton.jit
def _unique_mark(
    x_ptr, low_ptr, table_ptr, N, bins, copies,
    MODE: tl.constexpr, LOW: tl.constexpr, INFINITY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fill one copy of the bins."""
    program = tl.program_id(0)
    table_ptr += (program % copies).to(tl.int64) * bins
    count = tl.zeros([256], tl.int32)
    for start in range(program.to(tl.int64) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        if start + BLOCK_N <= N:
            x = tl.load(x_ptr + offs_n, eviction_policy="evict_first")
            count = _mark(table_ptr, count, _bin(x, low_ptr, LOW, INFINITY), True, MODE, False)
        else:
            x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0)
            bin_ = tl.where(offs_n < N, _bin(x, low_ptr, LOW, INFINITY), 0)
            count = _mark(table_ptr, count, bin_, offs_n < N, MODE, True)
    if MODE == "histogram":
        bin_ = tl.arange(0, 256)
        tl.store(table_ptr + bin_, count, mask=bin_ < bins)


@triton.jit
def _total(table_ptr, bins, copies, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return this program's bins and their counts over all copies."""
    bin_ = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N], tl.int64)
    for first in range(0, copies, ROWS):
        row = (first + rows).to(tl.int64)[:, None]
        inside = (row < copies) & (bin_ < bins)[None, :]
        total += tl.sum(tl.load(table_ptr + row * bins + bin_[None, :], mask=inside, other=0).to(tl.int64), axis=0)
    return bin_, total


@triton.jit
def _unique_groups(table_ptr, found_ptr, bins, copies, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the number of nonempty bins of each program and, after those, the count of the last bin."""
    bin_, total = _total(table_ptr, bins, copies, ROWS, BLOCK_N)
    tl.store(found_ptr + tl.program_id(0), tl.sum((total > 0).to(tl.int64)))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(found_ptr + tl.num_programs(0), tl.sum(tl.where(bin_ == bins - 1, total, 0)))


@triton.jit
def _unique_write(
    table_ptr, found_ptr, low_ptr, value_ptr, count_ptr, rank_ptr, bins, copies,
    COUNTS: tl.constexpr, RANKS: tl.constexpr, LOW: tl.constexpr, INFINITY: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Store values and counts of the nonempty bins, compacted, and the rank of each bin."""
    bin_, total = _total(table_ptr, bins, copies, ROWS, BLOCK_N)
    groups = tl.arange(0, BLOCK_G)
    before = tl.sum(tl.load(found_ptr + groups, mask=groups < tl.program_id(0), other=0))
    is_nonempty = total > 0
    rank = before + tl.cumsum(is_nonempty.to(tl.int64), axis=0) - 1
    tl.store(value_ptr + rank, _value(bin_, low_ptr, LOW, INFINITY).to(value_ptr.dtype.element_ty), mask=is_nonempty)
    if COUNTS:
        tl.store(count_ptr + rank, total, mask=is_nonempty)
    if RANKS:
        tl.store(rank_ptr + bin_, rank.to(rank_ptr.dtype.element_ty), mask=is_nonempty)


@triton.jit
def _unique_inverse(
    x_ptr, low_ptr, rank_ptr, inverse_ptr, N,
    LOW: tl.constexpr, INFINITY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the rank of each element's value."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= N:
        bin_ = _bin(tl.load(x_ptr + offs_n, eviction_policy="evict_first"), low_ptr, LOW, INFINITY)
        tl.store(inverse_ptr + offs_n, tl.load(rank_ptr + bin_).to(tl.int64))
    else:
        bin_ = _bin(tl.load(x_ptr + offs_n, mask=offs_n < N, other=0), low_ptr, LOW, INFINITY)
        rank = tl.load(rank_ptr + bin_, mask=offs_n < N, other=0)
        tl.store(inverse_ptr + offs_n, rank.to(tl.int64), mask=offs_n < N)


def _default(gpu: GPUFacts, form: str, size: int) -> Config:
    if form == "inverse":
        return {"BLOCK_N": 2048, "num_warps": 4}
    return {"BLOCK_N": 4096, "programs": 4 * gpu.sms, "num_warps": 8}


def _choices(gpu: GPUFacts, form: str, size: int) -> list[Config]:
    if form == "inverse":
        return [{"BLOCK_N": n, "num_warps": w} for n in (1024, 2048, 4096) for w in (4, 8)]
    shapes = [(2048, 4, 8), (4096, 8, 2), (4096, 8, 4), (8192, 8, 4), (8192, 16, 1), (8192, 16, 2)]
    return [{"BLOCK_N": n, "programs": per_sm * gpu.sms, "num_warps": w} for n, w, per_sm in shapes]


CONFIG = ConfigTable("unique.json", _default, _choices, takes_gpu=True)
_mark_launch = Launcher(_unique_mark)
_groups_launch = Launcher(_unique_groups)
_write_launch = Launcher(_unique_write)
_inverse_launch = Launcher(_unique_inverse)


def _torch_unique(x: Tensor, inverse: bool, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch._unique2(x, sorted=True, return_inverse=inverse, return_counts=counts)


def _fake(x: Tensor, inverse: bool, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(found),
        x.new_empty(x.shape if inverse else 0, dtype=torch.int64),
        x.new_empty(found if counts else 0, dtype=torch.int64),
    )


@operator("unique", fake=_fake)
def unique_forward(x: Tensor, inverse: bool, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values, the rank of each element, and counts; those that are not wanted are empty."""
    if x.numel() == 0:
        return _torch_unique(x, inverse, counts)
    N, device, dtype, size = x.numel(), x.device, x.dtype, x.element_size()
    bits = low = x.contiguous().view(BITS.get(dtype, dtype))
    bins, kind = 256**size, {"LOW": None, "INFINITY": INFINITIES.get(dtype)}
    if dtype in WIDE:
        low = torch.stack(torch.aminmax(bits))
        smallest, largest = low.tolist()
        bins = largest - smallest + 1
        if bins > min(MAX_BINS, max(2**16, 4 * N)):
            return _torch_unique(x, inverse, counts)
    elif dtype not in INFINITIES:
        kind["LOW"] = torch.iinfo(bits.dtype).min

    mode = "histogram" if bins <= 256 else "count" if counts or dtype in WIDE else "seen"
    config = dict(CONFIG(bits, mode, size))
    programs = min(config.pop("programs"), cdiv(N, config["BLOCK_N"]))
    copies = programs
    if mode == "count":  # a power of 4, so that few kernels are compiled
        most = max(1, min(MAX_COPIES, MAX_BINS // bins, N // (4 * bins)))
        copies = 4 ** ((most.bit_length() - 1) // 2)
    number = torch.int8 if mode == "seen" else torch.int32 if N < 2**31 else torch.int64
    table = torch.zeros(copies, bins, device=device, dtype=number)
    _mark_launch((programs,), bits, low, table, N, bins, copies, MODE=mode, **kind, **config)

    rows = min(MAX_COPIES, next_power_of_2(copies))
    block = min(TILE // rows, next_power_of_2(bins))
    tile = {"ROWS": rows, "BLOCK_N": block, "num_warps": 8}
    groups = cdiv(bins, block)
    found = torch.zeros(groups + 1, device=device, dtype=torch.int64)
    _groups_launch((groups,), table, found, bins, copies, **tile)
    *each, last = found.tolist()
    if last and dtype in INFINITIES:  # torch counts every NaN as a separate value
        return _torch_unique(x, inverse, counts)

    values = torch.empty(sum(each), device=device, dtype=dtype)
    count = torch.empty(len(values) if counts else 0, device=device, dtype=torch.int64)
    rank = torch.empty(bins if inverse else 0, device=device, dtype=torch.uint16 if bins <= 2**16 else torch.int32)
    index = torch.empty(x.shape if inverse else 0, device=device, dtype=torch.int64)
    _write_launch(
        (groups,), table, found, low, values.view(bits.dtype), count, rank, bins, copies,
        COUNTS=counts, RANKS=inverse, **kind, **tile, BLOCK_G=next_power_of_2(groups),
    )  # fmt: skip
    if inverse:
        config = CONFIG(bits, "inverse", size)
        _inverse_launch((cdiv(N, config["BLOCK_N"]),), bits, low, rank, index, N, **kind, **config)
    return values, index, count


@op.kernel("triton", language="triton")
def triton_unique(x: Tensor, inverse: bool) -> tuple[Tensor, ...]:
    return _wanted(unique_forward(x, inverse, True), inverse, True)


def _wanted(found: tuple[Tensor, Tensor, Tensor], inverse: bool, counts: bool) -> Any:
    """Return what torch.unique returns: one tensor, or a tuple of those that are wanted."""
    values, index, count = found
    if not inverse and not counts:
        return values
    return values, *((index,) if inverse else ()), *((count,) if counts else ())


CROSSOVER = Crossover("unique", faster_after(us=0.44, bytes_per_element=2))
# For 16 bits without the inverse: torch sorts them faster than we count them.
COUNT_CROSSOVER = Crossover("unique of 16 bits", never)


def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Unique values, with the arguments of `torch.unique`."""
    if (
        dim is None
        and all(type(option) is bool for option in (sorted, return_inverse, return_counts))
        and _is_eligible(input, return_inverse)
    ):
        return _wanted(unique_forward(input, return_inverse, return_counts), return_inverse, return_counts)
    return torch.unique(input, sorted, return_inverse, return_counts, dim)


def _is_eligible(x: Any, inverse: bool) -> bool:
    """Return whether our kernels can take x as torch would; torch raises where a gradient is required."""
    if not isinstance(x, Tensor) or x.dtype not in NARROW + WIDE or x.is_nested:
        return False
    crossover = COUNT_CROSSOVER if x.element_size() == 2 and not inverse else CROSSOVER
    device, size = x.get_device(), x.numel()
    if not crossover.reached(size, device):
        return False
    if not size or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return eligible(x if x.is_floating_point() else x.new_zeros(0, dtype=torch.float32))  # which checks floats only


@op.public
def public(x: Tensor, inverse: bool) -> tuple[Tensor, ...]:
    return unique(x, return_inverse=inverse, return_counts=True)
