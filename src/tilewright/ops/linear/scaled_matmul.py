"""Product of two fp8 matrices and their scales: c = (a scale_a) (b scale_b) + bias, summed in fp32.

A scale is one number, or one per row of a and per column of b, or one per block of 128 along K and of 1 or 128 rows of
a and columns of b. Scales that do not depend on k multiply the sums at the end; those that do multiply the product of
each slice of 128 before it is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.linear._fp8 import keeps_13_bits, precision_of_sums
from tilewright.ops.linear._triton import GROUP_M, _tile_at
from tilewright.ops.transpose import transpose_forward
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover, never
from tilewright.runtime.eligibility import FLOATS, is_interpreted
from tilewright.runtime.gpus import has_fp8
from tilewright.runtime.launch import TMA_ALIGNMENT, Launcher, PreparedLaunch, shared_memory
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, points

__all__ = ["scaled_matmul"]

BLOCK = 128  # steps of k, and rows or columns, that share a scale
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
DTYPES = {name: dtype for dtype, name in FORMATS.items()}


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return scales that broadcast to this shape."""
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scale


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    scaled_a, scaled_b = (x.to(wide) * _spread(s.to(wide), x.shape) for x, s in ((a, scale_a), (b, scale_b)))
    c = scaled_a @ scaled_b if bias is None else scaled_a @ scaled_b + bias.to(wide)
    return c if wide == torch.float64 else c.to(out_dtype)


def cost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Cost:
    (M, K), N = a.shape, b.shape[1]
    read = sum(t.nbytes for t in (a, b, scale_a, scale_b, bias) if t is not None)
    return Cost(read=read, written=M * N * out_dtype.itemsize, flops={"tensor.float8_e4m3fn": 2 * M * N * K})


def precision(a: Tensor, *_: object) -> float:
    return precision_of_sums(a)


def inputs(draw: Draw) -> tuple[Any, ...]:
    """Draw matrices as tensor cores take them, and scales that are positive and finite."""
    M, N, K = (draw[name] for name in "MNK")
    of_a, _, of_b = draw["formats"].partition("-")
    a, b = draw.randn("M", "K", dtype=DTYPES[of_a]), draw.randn("N", "K", dtype=DTYPES[of_b]).t()
    shapes = {
        "tensor": ((1, 1), (1, 1)),
        "rows": ((M, 1), (1, N)),
        "blocks": ((M, cdiv(K, BLOCK)), (cdiv(K, BLOCK), cdiv(N, BLOCK))),
        "squares": ((cdiv(M, BLOCK), cdiv(K, BLOCK)), (cdiv(K, BLOCK), N)),
    }[draw["scales"]]
    drawn = (draw.randn(*shape, dtype=torch.float32) for shape in shapes)
    scale_a, scale_b = (torch.where(s.isfinite(), s.abs(), 1.0) for s in drawn)
    return a, b, scale_a, scale_b, draw.randn("N") if draw["bias"] else None, draw.dtype


op = Op(
    "scaled_matmul",
    reference,
    cost,
    inputs=inputs,
    check=points(
        M=(1, 3, 130, 70, 129, 64),
        N=(1, 64, 65, 130, 264, 33),
        K=(1, 128, 300, 67, 257, 512),
        scales=("tensor", "rows", "blocks", "squares", "tensor", "blocks"),
        formats=("e4m3-e4m3", "e4m3-e4m3", "e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2", "e5m2-e5m2"),
        bias=(False, True, False, True, False, True),
    ),
    bench=points(
        M=(8192, 8192, 8192, 4096),
        N=(8192, 8192, 8192, 7168),
        K=(8192, 8192, 8192, 16384),
        scales=("tensor", "rows", "blocks", "blocks"),
        formats=("e4m3-e4m3",) * 4,
        bias=(False,) * 4,
    ),
    draws={"N": "intermediate", "K": "hidden"},
    grows="M",
    precision=precision,
)


@triton.jit
def _half(codes, FORMAT: tl.constexpr):
    """Return the values of fp8 codes as fp16, which holds them all, where the GPU has no fp8 tensor cores."""
    codes = codes.to(tl.int16)
    if FORMAT == "e5m2":  # an fp16 without its last bits
        return (codes << 8).to(tl.float16, bitcast=True)
    bits = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    value = bits.to(tl.float16, bitcast=True) * 256.0  # 2^8, the difference of the biases
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _scaled(sums, a_ptrs, b_ptrs, A_SHARES: tl.constexpr, B_SHARES: tl.constexpr):
    """Multiply sums by the scales of their rows and columns, each one number where it SHARES one.

    One after the other: the product of two tiny scales is 0, and that of 0 and an infinite sum NaN.
    """
    scale_a, scale_b = tl.load(a_ptrs), tl.load(b_ptrs)
    if not A_SHARES:
        scale_a = scale_a[:, None]
    if not B_SHARES:
        scale_b = scale_b[None, :]
    return sums * scale_a * scale_b


@triton.jit
def _scaled_matmul_fwd(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, c_ptr, stride_am, stride_ak, stride_bk, stride_bn,
    stride_sam, stride_sak, stride_sbk, stride_sbn, M, N, K,
    FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr, HAS_FP8: tl.constexpr, PROMOTES: tl.constexpr,
    SLICED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One tile of c. ROWS of a and COLUMNS of b share a scale; if SLICED, so do BLOCK_K steps of k, and no more.

    With HAS_FP8, a and b are fp8, else their codes. If PROMOTES, each step's product is added to the sums in fp32.
    """
    tile_m, tile_n = _tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # int64: M * K may exceed 2**31
    # Rows past the end wrap around: the loop needs no boundary masks, and their results are never stored.
    rows_m, rows_n = (offs_m % M).to(tl.int64), (offs_n % N).to(tl.int64)
    a_ptrs = a_ptr + rows_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + rows_n[None, :] * stride_bn
    A_SHARES: tl.constexpr = ROWS % BLOCK_M == 0
    B_SHARES: tl.constexpr = COLUMNS % BLOCK_N == 0
    scale_a_ptrs = scale_a_ptr + (tile_m * BLOCK_M if A_SHARES else rows_m) // ROWS * stride_sam
    scale_b_ptrs = scale_b_ptr + (tile_n * BLOCK_N if B_SHARES else rows_n) // COLUMNS * stride_sbn
    step = tl.full([], BLOCK_K, tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            inside = offs_k < K - start_k
            a = tl.load(a_ptrs, mask=inside[None, :], other=0.0 if HAS_FP8 else 0)
            b = tl.load(b_ptrs, mask=inside[:, None], other=0.0 if HAS_FP8 else 0)
        if not HAS_FP8:
            a, b = _half(a, FORMAT_A), _half(b, FORMAT_B)
        if SLICED:
            acc += _scaled(tl.dot(a, b), scale_a_ptrs, scale_b_ptrs, A_SHARES, B_SHARES)
            scale_a_ptrs += stride_sak
            scale_b_ptrs += stride_sbk
        elif PROMOTES:
            acc += tl.dot(a, b)
        else:
            acc = tl.dot(a, b, acc)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk

    if not SLICED:
        acc = _scaled(acc, scale_a_ptrs, scale_b_ptrs, A_SHARES, B_SHARES)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(c_ptr + offs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


# By the smallest number of rows of a: BLOCK_M, BLOCK_N, num_warps, num_stages. With the largest tile, each thread has
# 64 sums and 64 elements of the product of a step, so that one program fits into the registers of an SM.
MANY_ROWS = 257
TILES = {MANY_ROWS: (128, 128, 8, 4), 17: (64, 64, 4, 3), 0: (16, 64, 4, 3)}
_launch = Launcher(_scaled_matmul_fwd)


@cached_plan
def _plan(
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    blocks: tuple[bool, int, int],
    formats: tuple[str, str],
    dtypes: tuple[torch.dtype, torch.dtype | None],
    device: int,
    native: bool,
) -> PreparedLaunch:
    """Return the launch that takes the codes of a and b, their scales, bias and c; dtypes are of c and the bias."""
    M, N, K = sizes
    sliced, rows, columns = blocks
    block_m, block_n, warps, stages = next(tile for least, tile in TILES.items() if least <= M)
    if K % 16:  # loads are narrow, and each takes the registers of an address
        block_m, block_n, warps = min(block_m, 64), 64, 8
    elif not native or (sliced and columns == 1):  # each thread also has fp16 values, or the scales of its columns
        block_n = 64
    stages = max(1, min(stages, shared_memory(device) // ((block_m + block_n) * BLOCK)))
    return _launch.prepare(
        (cdiv(M, block_m) * cdiv(N, block_n),), *strides, M, N, K,
        FORMAT_A=formats[0], FORMAT_B=formats[1], HAS_FP8=native, PROMOTES=native and keeps_13_bits(device),
        SLICED=sliced, ROWS=rows, COLUMNS=columns, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK,
        GROUP_M=GROUP_M, EVEN_K=K % BLOCK == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _scale_strides(scale: Tensor) -> list[int]:
    """Return the strides of scales, 0 along dimensions that they do not depend on."""
    return [0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True)]


def _triton(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N, dtype=out_dtype)
    formats = FORMATS[a.dtype], FORMATS[b.dtype]
    native = has_fp8(a.get_device())
    if native and M >= MANY_ROWS:
        a, b = _along_k(a, b)
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))  # vector loads need a contiguous dimension
    sliced = scale_a.shape[1] > 1 or scale_b.shape[0] > 1
    rows, columns = (_sharing(many, size) for many, size in ((len(scale_a), M), (scale_b.shape[1], N)))
    strides = *a.stride(), *b.stride(), *_scale_strides(scale_a), *_scale_strides(scale_b)
    dtypes, device = (out_dtype, None if bias is None else bias.dtype), a.get_device()
    launch = _plan((M, N, K), strides, (sliced, rows, columns), formats, dtypes, device, native)
    bias = None if bias is None else bias.contiguous()
    # Codes would pass through registers to become fp8: fp8 goes from memory to the tensor cores.
    a, b = (a, b) if native else (a.view(torch.uint8), b.view(torch.uint8))
    launch(a, b, scale_a, scale_b, bias, c)
    return c


def _along_k(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices with k contiguous, as Hopper's fp8 tensor cores read them from shared memory.

    Transposing in registers, for every tile, takes seven times as long as the product.
    """
    return _with_rows(a), _with_rows(b.t()).t()


def _with_rows(x: Tensor) -> Tensor:
    """Return an fp8 matrix with contiguous rows."""
    if x.stride(1) == 1 or x.stride(0) != 1:
        return x if x.stride(1) == 1 else x.contiguous()
    return transpose_forward(x.t().view(torch.uint8), "triton").view(x.dtype)


def _sharing(scales: int, size: int) -> int:
    """Return how many rows or columns share a scale. Where all do, its stride is 0, and blocks of them share it too."""
    return 1 if scales == size > 1 else BLOCK


def _fits_torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: torch.dtype) -> bool:
    """Return whether cuBLAS takes a call: aligned matrices, one of them e4m3, and scales of a kind that it has."""
    if not a.is_cuda and not (a.is_meta and torch.cuda.is_available()):  # those without memory: on the current GPU
        return False
    if torch.version.hip is not None or torch.float8_e4m3fn not in (a.dtype, b.dtype):
        return False
    device = a.get_device() if a.is_cuda else torch.cuda.current_device()
    has_kernel = has_fp8(device) and (scale_a.numel() == scale_b.numel() == 1)
    if not has_kernel and out == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] == 9:
        has_kernel = _fits_rows(a, b, scale_a, scale_b) or (bias is None and _fits_blocks(a, b, scale_a, scale_b))
    is_stored = a.is_contiguous() and b.t().is_contiguous()
    is_aligned = all(n % TMA_ALIGNMENT == 0 for n in (*b.shape, a.data_ptr(), b.data_ptr()))
    takes_bias = bias is None or (bias.dtype == out != torch.float32 and bias.is_contiguous())
    return has_kernel and is_stored and is_aligned and takes_bias and a.numel() > 0


def _fits_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    by_row = scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
    return by_row and scale_a.is_contiguous() and scale_b.is_contiguous()


def _fits_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Return whether cuBLAS takes scales by blocks of 1x128 or 128x128, not both the latter; from CUDA 12.9 on."""
    (M, K), N = a.shape, b.shape[1]
    kinds = _sharing(len(scale_a), M), _sharing(scale_b.shape[1], N)
    is_known = K % (4 * BLOCK) == 0 and len(scale_a) in (M, cdiv(M, BLOCK)) and scale_b.shape[1] in (N, cdiv(N, BLOCK))
    is_known = is_known and scale_a.shape[1] == scale_b.shape[0] == K // BLOCK
    version = tuple(int(n) for n in (torch.version.cuda or "0").split(".")[:2])
    return is_known and M % 4 == 0 and kinds != (BLOCK, BLOCK) and version >= (12, 9)


def _torch(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if scale_a.shape[1] > 1:  # cuBLAS wants k along the rows of scales of 128x128, and along the columns of others
        scale_a = scale_a.contiguous() if len(scale_a) < len(a) else scale_a.t().contiguous().t()
        scale_b = scale_b.t().contiguous().t() if scale_b.shape[1] < b.shape[1] else scale_b.contiguous()
    return torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)


CROSSOVER = Crossover("scaled_matmul", never, unit="FMAs", size=lambda a, b, *_: a.numel() * b.shape[1])


def _best(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Call cuBLAS where it takes the call, our kernel on other GPUs and for other calls, and torch in fp32 on a CPU.

    Scales by blocks are our kernel's: those of cuBLAS have not been compared with it.
    """
    has_ours = a.is_cuda or is_interpreted(a)
    if a.is_cuda and a.shape[0] >= MANY_ROWS and has_fp8(a.get_device()):
        a, b = _along_k(a, b)
    args = a, b, scale_a, scale_b, bias, out_dtype
    if has_ours and CROSSOVER.reached(a.numel() * b.shape[1], a.get_device()):
        return _triton(*args)
    if scale_a.shape[1] == scale_b.shape[0] == 1 and _fits_torch(*args):
        return _torch(*args)
    return _triton(*args) if has_ours else reference(*args)


FORMS: dict[str, Callable[..., Tensor]] = {"triton": _triton, "torch": _torch, "best": _best}


def _product_like(a: Tensor, b: Tensor, *args: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=args[-2])


@operator("scaled_matmul", fake=_product_like)
def scaled_matmul_forward(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    formats: str,
    out_dtype: torch.dtype,
    form: str,
) -> Tensor:
    """The product of the codes a [M, K] and b [K, N], in formats such as "e4m3-e5m2", and scales of two dimensions.

    The codes are uint8: torch's tools for operators have few functions of fp8.
    """
    c = _product_like(a, b, out_dtype, form)
    if c.numel() == 0:
        return c
    if a.shape[1] == 0:  # there may be no scales either
        return c.zero_() if bias is None else c.copy_(bias)
    a, b = (codes.view(DTYPES[name]) for codes, name in zip((a, b), formats.split("-"), strict=True))
    return FORMS[form](a, b, scale_a, scale_b, bias, out_dtype)


def _run(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, form: str
) -> Tensor:
    formats = f"{FORMATS[a.dtype]}-{FORMATS[b.dtype]}"
    codes = a.view(torch.uint8), b.view(torch.uint8)
    return scaled_matmul_forward(*codes, scale_a, scale_b, bias, formats, out_dtype, form)


def _refuse_backward(ctx: Any, dc: Tensor) -> None:
    raise RuntimeError("scaled_matmul has no gradient, like torch's scaled_mm: multiply in a wider dtype to train")


scaled_matmul_forward.differentiate(lambda *_: None, _refuse_backward)


@op.kernel("triton", language="triton")
def triton_scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return _run(a, b, scale_a, scale_b, bias, out_dtype, "triton")


@op.kernel("scaled_mm", fits=_fits_torch, origin="baseline")
def torch_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return _torch(a, b, scale_a, scale_b, bias, out_dtype)


def _scale_of(name: str, scale: Tensor, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
    """Return a scale with two dimensions, each of one of these sizes."""
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        given = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"{name} must be a float32 tensor, not {given}")
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None] if name == "scale_a" else scale[None, :]
    if scale.dim() != 2 or scale.shape[0] not in rows or scale.shape[1] not in columns:
        allowed = " x ".join(f"[{' or '.join(map(str, dict.fromkeys(sizes)))}]" for sizes in (rows, columns))
        raise RuntimeError(f"{name} must be one number or of shape {allowed}, not {tuple(scale.shape)}")
    return scale


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(a * scale_a) @ (b * scale_b) + bias for fp8 matrices a [M, K] and b [K, N], e4m3 or e5m2, summed in fp32.

    A float32 scale has one number, or [M, 1] for the rows of a and [1, N] for the columns of b, or one per block of 128
    along K: [M or M/128, K/128] for a and [K/128, N or N/128] for b, rounded up. `out_dtype` is bfloat16, float16 or
    float32. There is no gradient.
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in FORMATS:
            raise TypeError(f"{name} must be float8_e4m3fn or float8_e5m2, not {x.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"a and b must be of shape [M, K] and [K, N], not {tuple(a.shape)} and {tuple(b.shape)}")
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be float32, float16 or bfloat16, not {out_dtype}")
    (M, K), N = a.shape, b.shape[1]
    if bias is not None and bias.shape != (N,):
        raise RuntimeError(f"the bias must be of shape [{N}], not {tuple(bias.shape)}")
    scale_a = _scale_of("scale_a", scale_a, (1, M, cdiv(M, BLOCK)), (1, cdiv(K, BLOCK)))
    scale_b = _scale_of("scale_b", scale_b, (1, cdiv(K, BLOCK)), (1, N, cdiv(N, BLOCK)))
    return _run(a, b, scale_a, scale_b, bias, out_dtype, "best")


op.public(scaled_matmul)
