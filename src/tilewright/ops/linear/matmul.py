"""Matrix product c = a b, from one thread per element to a warp-specialised ping-pong kernel.

The kernels form a ladder: each says what the previous one wastes. See `docs/matmul.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.ops.linear import _gluon, _numba, _triton
from tilewright.runtime.crossovers import Crossover, never
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import TMA_ALIGNMENT, aligned, rows_are_aligned
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["matmul"]

STORED = ("NN", "NT", "TN", "TT")  # T: the columns of a or b are contiguous


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def cost(a: Tensor, b: Tensor) -> Cost:
    (M, K), N = a.shape, b.shape[1]
    return Cost(read=a.nbytes + b.nbytes, written=M * N * a.element_size(), flops={matrix_unit(a.dtype): 2 * M * N * K})


def backward_cost(a: Tensor, b: Tensor) -> Cost:
    (M, K), N = a.shape, b.shape[1]
    return Cost(
        read=a.nbytes + b.nbytes + M * N * a.element_size(),
        written=a.nbytes + b.nbytes,
        flops={matrix_unit(a.dtype): 4 * M * N * K},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor]:
    transposed_a, transposed_b = (letter == "T" for letter in draw["stored"])
    a = draw.randn("K", "M").t() if transposed_a else draw.randn("M", "K")
    scale = draw["K"] ** -0.5
    b = draw.randn("N", "K", scale=scale).t() if transposed_b else draw.randn("K", "N", scale=scale)
    return a, b


op = Op(
    "matmul",
    reference,
    cost,
    inputs=inputs,
    check=[
        *points(M=(1, 3, 70, 129, 64), N=(1, 5, 130, 65, 64), K=(1, 7, 67, 256, 64), stored=("NN", *STORED)),
        *points(M=(136, 264, 8, 272), N=(264, 136, 520, 8), K=(72, 136, 200, 64), stored=STORED),
    ],
    bench=points(
        M=(1024, 4096, 8192, 16384, 4096, 4096, 8192),
        N=(4096, 4096, 8192, 16384, 14336, 4096, 6144),
        K=(4096, 4096, 8192, 16384, 4096, 14336, 4096),
        stored=("NT", "NN", "NT", "NT", "NT", "NT", "NT"),
    ),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "intermediate", "K": "hidden"},
)

CUDA = CudaSource("linear/matmul.cu", "matmul_naive", "matmul_tiled")
CUDA_THREADS = 256
CUDA_SIDE = {"matmul_naive": 16, "matmul_tiled": 64}  # rows and columns of a block's tile, as in matmul.cu
MAX_GRID_Y = 65535


def _cuda(kernel: str, a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c, side = a.new_empty(M, N), CUDA_SIDE[kernel]
    numbers = M, N, K, *a.stride(), *b.stride()
    blocks = cdiv(M, side), cdiv(N, side)
    CUDA.prepare(kernel, a.dtype, a.get_device(), blocks, CUDA_THREADS, *numbers)(a, b, c)
    return c


def _numba_tiled(a: Tensor, b: Tensor) -> Tensor:
    c = a.new_empty(a.shape[0], b.shape[1])
    with torch.cuda.device_of(a):  # Numba launches on the current device
        _numba.tiled(a, b, c)
    return c


def _described(kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a form that copies what TMA cannot read; the grouped Triton kernel takes what it could not write."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        if not _fits_tma(a, b):
            return _triton.matmul(a, b)
        return kernel(aligned(a), aligned(b))

    return run


def _gluon_form(kernel: str) -> Callable[[Tensor, Tensor], Tensor]:
    def run(a: Tensor, b: Tensor) -> Tensor:
        if not _gluon.runs_on(a.get_device()):
            raise NotImplementedError("the Gluon kernels need a GPU of compute capability 9.0")
        return _gluon.matmul(a, b, kernel)

    return _described(run)


def _row_length_fits(t: Tensor) -> bool:
    return t.shape[1] * t.element_size() % TMA_ALIGNMENT == 0


def _fits_tma(a: Tensor, b: Tensor) -> bool:
    """Return whether TMA can read a and b, or contiguous copies of them, and write c = a b."""
    if a.dtype not in (torch.float16, torch.bfloat16) or 0 in (*a.shape, *b.shape):
        return False
    return _row_length_fits(b) and all(rows_are_aligned(t) or _row_length_fits(t) for t in (a, b))


def fits_gluon(a: Tensor, b: Tensor) -> bool:
    """Return whether a Gluon kernel takes a b."""
    return _fits_tma(a, b) and _gluon.runs_on(a.get_device())


def _size(input: Tensor, other: Tensor) -> int:
    M = input.shape[:-1].numel()
    return M * M * input.shape[-1] * other.shape[-1]


CROSSOVER = Crossover("matmul", never, unit="rows x FMAs", size=_size)
L2_SIZES = 4  # from a larger b on, the smaller tiles of the ping-pong kernel read more than L2 delivers


def best_kernel(a: Tensor, b: Tensor) -> str:
    """Return the fastest Gluon kernel."""
    device = a.get_device()
    many_rows = _size(a, b) >= CROSSOVER[device]
    return "pingpong" if many_rows and b.nbytes <= L2_SIZES * gpu_facts(device).l2 else "cooperative"


def _wins(a: Tensor, b: Tensor) -> bool:
    """Return whether our kernels take these matrices as they are, and are faster than cuBLAS."""
    return (
        CROSSOVER.reached(_size(a, b), a.get_device())
        and rows_are_aligned(a)
        and rows_are_aligned(b)
        and fits_gluon(a, b)
    )


def _best(a: Tensor, b: Tensor) -> Tensor:
    return _gluon.matmul(a, b, best_kernel(a, b)) if _wins(a, b) else torch.mm(a, b)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cuda-naive": lambda a, b: _cuda("matmul_naive", a, b),
    "cuda-tiled": lambda a, b: _cuda("matmul_tiled", a, b),
    "numba": _numba_tiled,
    "triton-rows": lambda a, b: _triton.matmul(a, b, group=1),
    "triton": _triton.matmul,
    "triton-persistent": _described(_triton.persistent),
    "gluon-pipelined": _gluon_form("pipelined"),
    "gluon-cooperative": _gluon_form("cooperative"),
    "gluon-pingpong": _gluon_form("pingpong"),
    "best": _best,  # ours or cuBLAS, whichever is faster for these sizes
}


def _product_like(a: Tensor, b: Tensor, *_: object) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@operator("matmul", fake=_product_like)
def matmul_forward(a: Tensor, b: Tensor, form: str) -> Tensor:
    """The product of a [M, K] and b [K, N], of any strides."""
    if 0 in (a.shape[0], b.shape[1]):
        return _product_like(a, b)
    return FORMS[form](a, b)


def _save(ctx, inputs, output) -> None:
    a, b, ctx.form = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, dc: Tensor):
    a, b = ctx.saved_tensors
    needs_a, needs_b, _ = ctx.needs_input_grad
    return (
        matmul_forward(dc, b.t(), ctx.form) if needs_a else None,
        matmul_forward(a.t(), dc, ctx.form) if needs_b else None,
    )


matmul_forward.differentiate(_save, _backward)


@op.kernel("cuda-naive", language="cuda", fits=lambda a, b: b.shape[1] <= CUDA_SIDE["matmul_naive"] * MAX_GRID_Y)
def cuda_naive(a: Tensor, b: Tensor) -> Tensor:
    """One thread per element of c. Every element of a is loaded N times, so L1 and L2 limit it."""
    return matmul_forward(a, b, "cuda-naive")


@op.kernel("cuda-tiled", language="cuda", fits=lambda a, b: b.shape[1] <= CUDA_SIDE["matmul_tiled"] * MAX_GRID_Y)
def cuda_tiled(a: Tensor, b: Tensor) -> Tensor:
    """Tiles in shared memory and sums in registers. The naive kernel loads each element once per row of c.

    Now fp32 FMAs are the limit: the tensor cores are idle.
    """
    return matmul_forward(a, b, "cuda-tiled")


@op.kernel("numba", language="numba", fits=lambda a, b: a.dtype == torch.float32, differentiable=False)
def numba(a: Tensor, b: Tensor) -> Tensor:
    """The same idea in Python: one element per thread, so each value in shared memory is used once per read."""
    return matmul_forward(a, b, "numba")


@op.kernel("triton-rows", language="triton")
def triton_rows(a: Tensor, b: Tensor) -> Tensor:
    """A tile per program on the tensor cores, which all kernels above leave idle. Tiles are taken row by row."""
    return matmul_forward(a, b, "triton-rows")


@op.kernel("triton", language="triton")
def triton_grouped(a: Tensor, b: Tensor) -> Tensor:
    """Tiles in groups of rows. Row by row, the programs in flight read all of b through L2 for a single row of a."""
    return matmul_forward(a, b, "triton")


@op.kernel("triton-persistent", language="triton", fits=_fits_tma)
def triton_persistent(a: Tensor, b: Tensor) -> Tensor:
    """One program per SM takes many tiles, and TMA computes the addresses.

    A program per tile fills its pipeline for each tile again, and its warps spend registers and instructions on
    addresses.
    """
    return matmul_forward(a, b, "triton-persistent")


@op.kernel("gluon-pipelined", language="gluon", fits=fits_gluon)
def gluon_pipelined(a: Tensor, b: Tensor) -> Tensor:
    """The pipeline written out: barriers, slots and wgmma in flight are chosen, not left to the compiler."""
    return matmul_forward(a, b, "gluon-pipelined")


@op.kernel("gluon-cooperative", language="gluon", fits=fits_gluon)
def gluon_cooperative(a: Tensor, b: Tensor) -> Tensor:
    """One warp copies and two warpgroups multiply the halves of a tile.

    In the pipelined kernel all warps wait for each other at every step and stop copying while they store a tile.
    """
    return matmul_forward(a, b, "gluon-cooperative")


@op.kernel("gluon-pingpong", language="gluon", fits=fits_gluon)
def gluon_pingpong(a: Tensor, b: Tensor) -> Tensor:
    """Two warpgroups take turns: one multiplies while the other stores, so the tensor cores never wait for a store.

    Cooperative consumers finish their halves at about the same time, and then both store.
    """
    return matmul_forward(a, b, "gluon-pingpong")


@op.public
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Matrix product with the arguments of `torch.matmul`."""
    if (
        not torch.compiler.is_compiling()  # which fuses the epilogue into its own GEMM
        and isinstance(input, Tensor)
        and isinstance(other, Tensor)
        and input.dim() > 1
        and other.dim() == 2
        and input.shape[-1] == other.shape[0]
        and CROSSOVER.reached(_size(input, other), input.get_device())
        and eligible(input, other)
        and (input.dim() == 2 or input.is_contiguous())
    ):
        a = input.view(-1, input.shape[-1]) if input.dim() > 2 else input
        if _wins(a, other):
            return matmul_forward(a, other, "best").view(*input.shape[:-1], other.shape[1])
    return torch.matmul(input, other)
