"""Grouped linear layer, as in mixture of experts: rows of x sorted by group, and a weight for each group.

Group g has the rows from offsets[g - 1], or 0, to offsets[g]: y = x wᵀ for its rows and its weight. How many rows a
group has is known on the GPU alone, so a fixed number of programs take tiles until none is left, and each finds out
from the offsets which group a tile belongs to. The gradient of x is the same product with transposed weights. That of a
weight is a sum over the rows of its group, by one program per tile, so it needs no atomics.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.linear._triton import GROUP_M, _precision, _tile_at
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover, is_captured, never
from tilewright.runtime.eligibility import FLOATS, eligible, is_interpreted
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import TMA_ALIGNMENT, Launcher, PreparedLaunch, shared_memory
from tilewright.runtime.operator import is_observed, operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["grouped_linear"]


def reference(x: Tensor, weights: Tensor, offsets: Tensor, ends: tuple[int, ...]) -> Tensor:
    starts = (0, *ends)
    groups = [F.linear(x[start:end], weight) for start, end, weight in zip(starts, ends, weights, strict=False)]
    return torch.cat([*groups, x.new_zeros(len(x) - starts[-1], weights.shape[1])])


def cost(x: Tensor, weights: Tensor, offsets: Tensor, ends: tuple[int, ...]) -> Cost:
    (M, K), N = x.shape, weights.shape[1]
    used = sum(end > start for start, end in itertools.pairwise((0, *ends)))  # groups that have rows
    return Cost(
        read=x.nbytes + used * N * K * x.element_size() + offsets.nbytes,
        written=M * N * x.element_size(),
        flops={matrix_unit(x.dtype): 2 * ends[-1] * N * K},
    )


def backward_cost(x: Tensor, weights: Tensor, offsets: Tensor, ends: tuple[int, ...]) -> Cost:
    N, K = weights.shape[1:]
    forward = cost(x, weights, offsets, ends)
    return Cost(
        read=forward.read + forward.written,
        written=x.nbytes + weights.nbytes,
        flops={matrix_unit(x.dtype): 4 * ends[-1] * N * K},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Draw groups of random sizes, some empty, or of equal ones. The host knows their ends, as a baseline may.

    The sizes do not depend on the seed: a timed call takes its tensors from several draws, and the ends from one.
    """
    M, E = draw["M"], draw["E"]
    if draw["even"]:
        ends = tuple(M * (g + 1) // E for g in range(E))
    else:
        rng = random.Random(M)
        ends = (*sorted(rng.randint(0, M) for _ in range(E - 1)), M)
    offsets = torch.tensor(ends, dtype=torch.int32, device=draw.device)
    return draw.randn("M", "K"), draw.randn("E", "N", "K", scale=draw["K"] ** -0.5), offsets, ends


op = Op(
    "grouped_linear",
    reference,
    cost,
    inputs=inputs,
    takes=lambda case: case["E"] > 0,
    check=points(
        M=(1, 3, 70, 300, 129),
        N=(1, 5, 65, 64, 130),
        K=(1, 7, 67, 64, 40),
        E=(1, 4, 3, 2, 9),
        even=(True, False, False, True, False),
    ),
    bench=points(  # the first projection of the experts in Llama 4, and of those of DeepSeek V3 on one of four GPUs
        M=(16384, 16384, 32768),
        N=(8192, 8192, 2048),
        K=(5120, 5120, 7168),
        E=(16, 16, 64),
        even=(True, False, False),
    ),
    backward_cost=backward_cost,
    grows="M",
    draws={"N": "intermediate", "K": "hidden"},
)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _grouped_linear_fwd(
    x_ptr, w_ptr, offsets_ptr, y_ptr,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, M, N, K, E,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Rows after the last group are those of another one, number E, without a weight: their results are zero.
    offs_e = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + offs_e - 1, mask=(offs_e > 0) & (offs_e <= E), other=0).to(tl.int32)
    ends = tl.load(offsets_ptr + offs_e, mask=offs_e < E, other=M).to(tl.int32)
    # Offsets that do not ascend make groups empty: no row is written twice, and none outside the matrices.
    starts = tl.associative_scan(tl.minimum(tl.where(offs_e > E, M, starts), M), 0, _larger)
    ends = tl.maximum(tl.associative_scan(tl.minimum(ends, M), 0, _larger), 0)
    starts = tl.maximum(starts, 0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    last = tl.cumsum(tiles, 0)
    tiles_m, tiles_n = tl.sum(tiles, 0), tl.cdiv(N, BLOCK_N)

    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
        group = tl.sum((last <= tile_m).to(tl.int32), 0)
        is_here = offs_e == group
        end = tl.sum(tl.where(is_here, ends, 0), 0)
        start_m = tl.sum(tl.where(is_here, starts + (tile_m - last + tiles) * BLOCK_M, 0), 0)

        # Rows past the end repeat the last one: the loop needs no boundary masks, and they are never stored.
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # int64: M * K may exceed 2**31
        rows_m, rows_n = tl.minimum(offs_m, end - 1).to(tl.int64), (offs_n % N).to(tl.int64)
        x_ptrs = x_ptr + rows_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
        w_ptrs = w_ptr + group.to(tl.int64) * stride_we + offs_k[:, None] * stride_wk + rows_n[None, :] * stride_wn
        step = tl.full([], BLOCK_K, tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start_k in range(0, tl.where(group < E, K, 0), BLOCK_K):
            if EVEN_K:
                x, w = tl.load(x_ptrs), tl.load(w_ptrs)
            else:
                inside = offs_k < K - start_k
                x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=inside[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            x_ptrs += step * stride_xk
            w_ptrs += step * stride_wk
        offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
        tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < end)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _grouped_linear_dw(
    dy_ptr, x_ptr, offsets_ptr, dw_ptr, stride_ym, stride_yn, stride_xm, stride_xk, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = _tile_at(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_N)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0).to(tl.int32)
    start = tl.maximum(start, 0)
    end = tl.minimum(tl.load(offsets_ptr + group).to(tl.int32), M)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    columns_n, columns_k = (offs_n % N).to(tl.int64), (offs_k % K).to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start_m in range(start, end, BLOCK_M):
        rows = start_m + offs_m
        rows_m, inside = rows.to(tl.int64)[:, None], (rows < end)[:, None]
        dy = tl.load(dy_ptr + rows_m * stride_ym + columns_n[None, :] * stride_yn, mask=inside, other=0.0)
        x = tl.load(x_ptr + rows_m * stride_xm + columns_k[None, :] * stride_xk, mask=inside, other=0.0)
        acc = tl.dot(dy.T, x, acc, input_precision=PRECISION)
    offs = (group.to(tl.int64) * N + offs_n[:, None]) * K + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
    tl.store(dw_ptr + offs, acc.to(dw_ptr.dtype.element_ty), mask=(offs_n < N)[:, None] & (offs_k < K)[None, :])


@triton.jit
def _zero_tail(offsets_ptr, y_ptr, M, N, E, BLOCK: tl.constexpr):
    start = tl.load(offsets_ptr + E - 1).to(tl.int64) * N
    size = tl.full([], M, tl.int64) * N
    for block in range(start + tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        offs = block + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=(offs >= 0) & (offs < size))


# By the smallest number of rows per group on average: BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages.
TILES = {
    "half": {96: (128, 128, 64, 8, 3), 33: (64, 128, 64, 4, 3), 0: (16, 128, 64, 4, 3)},
    "tf32": {96: (128, 64, 32, 8, 3), 0: (16, 64, 32, 4, 3)},
    "ieee": {96: (64, 64, 16, 8, 3), 0: (16, 32, 32, 4, 3)},
}
WEIGHT_TILES = {"half": (128, 128, 64, 8, 3), "tf32": (64, 64, 32, 8, 3), "ieee": (64, 64, 16, 8, 3)}  # N, K, rows
# Where loads are narrow, each takes the registers of an address, and deeper slices spill.
UNALIGNED_K, UNALIGNED_WARPS, UNALIGNED_ROWS = 32, 8, 16
PROGRAMS = 2  # per SM: one stores a tile while the other multiplies
_launch_fwd, _launch_dw, _launch_tail = map(Launcher, (_grouped_linear_fwd, _grouped_linear_dw, _zero_tail))


def _unit(dtype: torch.dtype, precision: str) -> str:
    return precision if dtype == torch.float32 else "half"


def _stages(wanted: int, slice_bytes: int, device: int) -> int:
    return max(1, min(wanted, shared_memory(device) // slice_bytes))


@cached_plan
def _plan(
    sizes: tuple[int, int, int, int],
    strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: int,
    precision: str,
) -> PreparedLaunch:
    """Return the launch that takes x and weights of these strides, offsets and y; dtypes are of x and offsets."""
    M, N, K, E = sizes
    tiles = TILES[_unit(dtypes[0], precision)]
    block_m, block_n, block_k, warps, stages = next(tile for rows, tile in tiles.items() if rows * E <= M)
    if K % 16:
        block_k, warps = min(block_k, UNALIGNED_K), UNALIGNED_WARPS
    stages = _stages(stages, (block_m + block_n) * block_k * dtypes[0].itemsize, device)
    most = (cdiv(M, block_m) + E) * cdiv(N, block_n)  # tiles: each group, and the rest, may end with a partial one
    return _launch_fwd.prepare(
        (min(most, PROGRAMS * gpu_facts(device).sms),), *strides, M, N, K, E,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_E=next_power_of_2(E + 1), GROUP_M=GROUP_M,
        EVEN_K=K % block_k == 0, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@cached_plan
def _weight_plan(
    sizes: tuple[int, int, int, int],
    strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: int,
    precision: str,
) -> PreparedLaunch:
    """Return the launch that takes dy and x of these strides, offsets and the gradient of the weights."""
    M, N, K, E = sizes
    block_n, block_k, block_m, warps, stages = WEIGHT_TILES[_unit(dtypes[0], precision)]
    block_m = min(block_m, UNALIGNED_ROWS) if N % 16 or K % 16 else block_m
    stages = _stages(stages, (block_n + block_k) * block_m * dtypes[0].itemsize, device)
    return _launch_dw.prepare(
        (E * cdiv(N, block_n) * cdiv(K, block_k),), *strides, M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_N=GROUP_M, PRECISION=precision,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    """Return x with a contiguous dimension, for vector loads."""
    return x if 1 in x.stride()[-2:] else x.contiguous()


def _triton_product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    (M, K), (E, N, _) = x.shape, weights.shape
    x, weights, y = _dense(x), _dense(weights), x.new_empty(M, N)
    dtypes = x.dtype, offsets.dtype
    launch = _plan((M, N, K, E), (*x.stride(), *weights.stride()), dtypes, x.get_device(), _precision())
    launch(x, weights, offsets.contiguous(), y)
    return y


def _triton_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    (M, N), K, E = dy.shape, x.shape[1], len(offsets)
    dy, x, dw = _dense(dy), _dense(x), x.new_empty(E, N, K)
    dtypes = x.dtype, offsets.dtype
    launch = _weight_plan((M, N, K, E), (*dy.stride(), *x.stride()), dtypes, x.get_device(), _precision())
    launch(dy, x, offsets.contiguous(), dw)
    return dw


def _slices(offsets: Tensor, rows: int) -> list[slice]:
    """Return the rows of each group; the host waits for the offsets."""
    ends = [min(end, rows) for end in offsets.tolist()]
    return [slice(start, max(start, end)) for start, end in itertools.pairwise((0, *ends))]


def _looped_product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], weights.shape[1])
    for rows, weight in zip(_slices(offsets, x.shape[0]), weights, strict=True):
        torch.mm(x[rows], weight.t(), out=y[rows])
    return y


def _looped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dw = x.new_empty(len(offsets), dy.shape[1], x.shape[1])
    for rows, out in zip(_slices(offsets, x.shape[0]), dw, strict=True):
        torch.mm(dy[rows].t(), x[rows], out=out)
    return dw


GROUPED_MM_GPUS = (9, 10)  # major compute capabilities; elsewhere, torch's own function waits for the offsets
GROUPED_MM_GROUPS = 1023
TAIL_BLOCK = 4096


def _fits_grouped_mm(x: Tensor, columns: int, groups: int) -> bool:
    """Return whether torch has a grouped kernel for x and results of this many columns."""
    is_on_gpu = torch.cuda.is_available() and not x.is_cpu  # tools ask with tensors without memory
    if not is_on_gpu or torch.version.hip is not None or x.dtype != torch.bfloat16:
        return False
    device = x.device if x.is_cuda else None
    has_kernel = torch.cuda.get_device_capability(device)[0] in GROUPED_MM_GPUS and groups <= GROUPED_MM_GROUPS
    is_aligned = all(size * x.element_size() % TMA_ALIGNMENT == 0 for size in (x.shape[1], columns))
    return has_kernel and is_aligned and x.numel() > 0


def _copied_if_unaligned(x: Tensor) -> Tensor:
    """Return x as it is if it is contiguous and aligned, or weights whose transposes are, else a copy."""
    is_dense = x.is_contiguous() or (x.dim() == 3 and x.transpose(1, 2).is_contiguous())
    return x if is_dense and x.data_ptr() % TMA_ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _torch_product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the product by torch's grouped kernel, which leaves rows after the last group undefined."""
    x, weights = (_copied_if_unaligned(t) for t in (x, weights))
    offsets = offsets.to(torch.int32).contiguous()
    y = F.grouped_mm(x, weights.transpose(1, 2), offs=offsets).contiguous()
    programs, sizes = gpu_facts(x.get_device()).sms, (*y.shape, len(offsets))
    _launch_tail((programs,), offsets, y, *sizes, BLOCK=TAIL_BLOCK)
    return y


def _torch_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dy, x = (_copied_if_unaligned(t) for t in (dy, x))
    return F.grouped_mm(dy.t(), x, offs=offsets.to(torch.int32)).contiguous()


CROSSOVER = Crossover(
    "grouped_linear", never, unit="FMAs", size=lambda input, weights, *_: input.numel() * weights.shape[1]
)


def _best(x: Tensor, columns: int, groups: int) -> str:
    """Return the fastest form: torch's grouped kernel, else a loop of GEMMs that waits for the offsets, or ours."""
    has_ours = (x.is_cuda or is_interpreted(x)) and x.dtype in FLOATS
    if has_ours and CROSSOVER.reached(x.numel() * columns, x.get_device()):
        return "triton"
    if _fits_grouped_mm(x, columns, groups):
        return "torch"
    return "triton" if has_ours and is_captured() else "loop"  # nothing may wait while a CUDA graph is captured


def _best_product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return FORMS[_best(x, weights.shape[1], len(offsets))][0](x, weights, offsets)


def _best_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return FORMS[_best(x, dy.shape[1], len(offsets))][1](dy, x, offsets)


Product = Callable[[Tensor, Tensor, Tensor], Tensor]
FORMS: dict[str, tuple[Product, Product]] = {  # the product, and the gradient of the weights
    "triton": (_triton_product, _triton_weight_gradient),
    "torch": (_torch_product, _torch_weight_gradient),
    "loop": (_looped_product, _looped_weight_gradient),
    "best": (_best_product, _best_weight_gradient),
}


def _rows(x: Tensor, weights: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


def _weights(dy: Tensor, x: Tensor, offsets: Tensor, *_: object) -> Tensor:
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


@operator("grouped_linear", fake=_rows)
def grouped_linear_forward(x: Tensor, weights: Tensor, offsets: Tensor, form: str) -> Tensor:
    """The rows [M, N] of x [M, K], each by the weight [N, K] of its group; rows after the last group are zero."""
    is_empty = 0 in (*x.shape, *weights.shape)
    return _rows(x, weights).zero_() if is_empty else FORMS[form][0](x, weights, offsets)


@operator("grouped_linear_weight_gradient", fake=_weights)
def grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor, form: str) -> Tensor:
    """The sums [E, N, K] over the rows of each group of dyᵀ x, for dy [M, N] and x [M, K]."""
    is_empty = 0 in (*dy.shape, *x.shape, *offsets.shape)
    return _weights(dy, x, offsets).zero_() if is_empty else FORMS[form][1](dy, x, offsets)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy: Tensor):
    x, weights, offsets = ctx.saved_tensors
    needs_x, needs_weights, *_ = ctx.needs_input_grad
    return (
        grouped_linear_forward(dy, weights.transpose(1, 2), offsets, ctx.form) if needs_x else None,
        grouped_weight_gradient(dy, x, offsets, ctx.form) if needs_weights else None,
    )


def _weight_gradient_backward(ctx, ddw: Tensor):
    dy, x, offsets = ctx.saved_tensors
    needs_dy, needs_x, *_ = ctx.needs_input_grad
    return (
        grouped_linear_forward(x, ddw, offsets, ctx.form) if needs_dy else None,
        grouped_linear_forward(dy, ddw.transpose(1, 2), offsets, ctx.form) if needs_x else None,
    )


grouped_linear_forward.differentiate(_save, _backward)
grouped_weight_gradient.differentiate(_save, _weight_gradient_backward)


@op.kernel("triton", language="triton")
def triton_grouped(x: Tensor, weights: Tensor, offsets: Tensor, ends: tuple[int, ...]) -> Tensor:
    return grouped_linear_forward(x, weights, offsets, "triton")


@op.kernel("grouped_mm", fits=lambda x, weights, *_: _fits_grouped_mm(x, weights.shape[1], len(weights)))
def torch_grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor, ends: tuple[int, ...]) -> Tensor:
    return grouped_linear_forward(x, weights, offsets, "torch")


@op.also
def rows_after_the_last_group(device: str) -> None:
    offsets, y = (torch.empty(4096, 4096, dtype=dtype, device=device) for dtype in (torch.int32, torch.bfloat16))
    _launch_tail((gpu_facts(y.get_device()).sms,), offsets[0], y, *y.shape, 64, BLOCK=TAIL_BLOCK)


def _check(input: Tensor, weights: Tensor, offsets: Tensor) -> None:
    if input.dim() != 2 or weights.dim() != 3 or input.shape[1] != weights.shape[2]:
        shapes = f"{tuple(input.shape)} and {tuple(weights.shape)}"
        raise RuntimeError(f"the input must be of shape [M, K] and the weights of shape [E, N, K], not {shapes}")
    if input.dtype != weights.dtype:
        raise RuntimeError(f"input and weights must have the same dtype, not {input.dtype} and {weights.dtype}")
    if offsets.shape != weights.shape[:1]:
        shapes = f"[{weights.shape[0]}], the end of each group, not {tuple(offsets.shape)}"
        raise RuntimeError(f"offsets must be of shape {shapes}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be int32 or int64, not {offsets.dtype}")


def _check_values(ends: Sequence[int], rows: int) -> None:
    for group, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        if end < start:
            before = f"after {start}" if group else "below 0"
            raise ValueError(f"offsets must ascend from 0, but offsets[{group}] is {end}, {before}")
    if ends and ends[-1] > rows:
        raise ValueError(f"offsets must not exceed the {rows} rows of the input, but the last is {ends[-1]}")


def grouped_linear(input: Tensor, weights: Tensor, offsets: Tensor | Sequence[int]) -> Tensor:
    """Linear layer of rows [M, K] in groups, with a weight [N, K] per group, as in mixture of experts.

    The rows of group g end before row offsets[g], as in `torch.nn.functional.grouped_mm`; groups may be empty. Rows
    after the last group have results and gradients of zero. Offsets on a GPU are not checked, since that would wait for
    it; those on the host, or in a list, must ascend.
    """
    for name, x in (("input", input), ("weights", weights)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if not isinstance(offsets, Tensor):
        offsets = torch.tensor(offsets) if len(offsets) else torch.empty(0, dtype=torch.int64)
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype in FLOATS and weights.dtype in FLOATS:
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return grouped_linear(input.to(dtype), weights.to(dtype), offsets)
    _check(input, weights, offsets)
    if is_observed():  # offsets have no values while torch traces
        return grouped_linear_forward(input, weights, offsets.to(input.device), "best")
    if offsets.device.type == "cpu":
        _check_values(offsets.tolist(), len(input))
    if eligible(input, weights):
        return grouped_linear_forward(input, weights, offsets.to(input.device), "best")
    ends = tuple(offsets.tolist())
    return reference(input, weights, offsets, ends)


@op.public
def public(x: Tensor, weights: Tensor, offsets: Tensor, ends: tuple[int, ...]) -> Tensor:
    return grouped_linear(x, weights, offsets)
