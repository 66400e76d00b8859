"""Dot product of two vectors: out = sum of x * y.

A split reduction: each program computes the partial sum of one part of the vectors, and a second kernel adds the
partial sums. There are no atomics and the order is fixed, so results are deterministic.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.reduce._numba import NUMBA_THREADS, numba_sum_chunks, numba_tree_sum
from tilewright.ops.reduce._plans import plan_row_sums, split
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover, faster_after
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.elementwise import eligible_elementwise
from tilewright.runtime.launch import Launcher
from tilewright.runtime.numba import launch, numba_cuda
from tilewright.runtime.operator import contiguous_like, operator, scatter
from tilewright.runtime.pdl import has_pdl, launch_dependents
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Op, grid

__all__ = ["dot"]


def reference(x: Tensor, y: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        return torch.dot(x.float(), y.float()).to(x.dtype)  # torch raises on CPUs with disabled AMX
    return torch.dot(x, y)


def cost(x: Tensor, y: Tensor) -> Cost:
    return Cost(read=x.nbytes + y.nbytes, written=x.element_size(), flops={"fp32": 2 * x.numel()})


def backward_cost(x: Tensor, y: Tensor) -> Cost:
    return Cost(read=x.nbytes + y.nbytes, written=x.nbytes + y.nbytes, flops={"fp32": 2 * x.numel()})


op = Op(
    "dot",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N"), draw.randn("N")),
    check=grid(N=(1, 2, 509, 4097, 300007)),
    bench=grid(N=(2**20, 2**24, 2**28)),
    backward_cost=backward_cost,
    grows="N",
    bench_dtypes=("float32",),
)


@triton.jit
def _dot_chunk(x_ptr, y_ptr, partial_ptr, N, chunk, PDL: tl.constexpr, BLOCK_N: tl.constexpr):
    launch_dependents(PDL)
    part = tl.program_id(0).to(tl.int64)  # int64: N may exceed 2**31
    begin = part * chunk
    end = tl.minimum(begin + chunk, N)
    rest = begin + (end - begin) // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin, rest, BLOCK_N):  # without a mask accesses stay 16 bytes wide for every N
        x = tl.load(x_ptr + start + offs_n).to(tl.float32)
        total += x * tl.load(y_ptr + start + offs_n).to(tl.float32)
    if rest < end:
        x = tl.load(x_ptr + rest + offs_n, mask=rest + offs_n < end, other=0.0).to(tl.float32)
        total += x * tl.load(y_ptr + rest + offs_n, mask=rest + offs_n < end, other=0.0).to(tl.float32)
    tl.store(partial_ptr + part, tl.sum(total, axis=0))


@triton.jit
def _scaled_copy(x_ptr, grad, y_ptr, offs_n, N, EVEN: tl.constexpr):
    mask = None if EVEN else offs_n < N
    x = tl.load(x_ptr + offs_n, mask=mask, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + offs_n, (grad * x).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dot_bwd(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, N, EVEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """dx = grad y and dy = grad x, or only one of them."""
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    grad = tl.load(grad_ptr).to(tl.float32)
    if dx_ptr is not None:
        _scaled_copy(y_ptr, grad, dx_ptr, offs_n, N, EVEN)
    if dy_ptr is not None:
        _scaled_copy(x_ptr, grad, dy_ptr, offs_n, N, EVEN)


BLOCK_N = 4096
BACKWARD_BLOCK = 2048
_launch = Launcher(_dot_chunk)
_launch_backward = Launcher(_dot_bwd)


@cached_plan
def _plan(N: int, dtype: torch.dtype, device: int) -> Callable[..., None]:
    chunk, chunks = split(1, N, BLOCK_N, device)
    multiply = _launch.prepare((chunks,), N, chunk, PDL=has_pdl(device), BLOCK_N=BLOCK_N, num_warps=4)
    add_up = plan_row_sums(1, chunks, device)

    def launch(x: Tensor, y: Tensor, out: Tensor) -> None:
        partial = x.new_empty(chunks, dtype=torch.float32)
        multiply(x, y, partial)
        add_up(partial, out)

    return launch


def _triton(x: Tensor, y: Tensor, out: Tensor) -> None:
    _plan(x.numel(), x.dtype, x.get_device())(x, y, out)


CUDA = CudaSource("reduce/dot.cu", "dot_chunks", "dot_partials")
CUDA_THREADS = 256  # any number works
CUDA_BLOCK = 16384  # parts are multiples of it


def _cuda(x: Tensor, y: Tensor, out: Tensor) -> None:
    chunk, chunks = split(1, x.numel(), CUDA_BLOCK, x.get_device())
    partial = torch.empty(chunks, dtype=torch.float32, device=x.device)
    shared = 4 * CUDA_THREADS  # bytes: one float per thread
    where = x.dtype, x.get_device()
    CUDA.prepare("dot_chunks", *where, (chunks,), CUDA_THREADS, x.numel(), chunk, shared=shared)(x, y, partial)
    CUDA.prepare("dot_partials", *where, (1,), CUDA_THREADS, chunks, shared=shared)(partial, out)


@functools.cache
def _numba_kernel() -> Any:
    global nb
    nb = numba_cuda()
    from numba import float32

    tree_sum = numba_tree_sum()

    @nb.jit
    def dot_chunks(x, y, partial, chunk):
        piece = nb.blockIdx.x
        end = min((piece + 1) * chunk, x.size)
        total = float32(0)
        for n in range(piece * chunk + nb.threadIdx.x, end, nb.blockDim.x):
            total += x[n] * y[n]
        total = tree_sum(total)
        if nb.threadIdx.x == 0:
            partial[0, piece] = total

    return dot_chunks


def _numba(x: Tensor, y: Tensor, out: Tensor) -> None:
    chunk, chunks = split(1, x.numel(), BLOCK_N, x.get_device())
    partial = torch.empty(1, chunks, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # Numba launches on the current device
        launch(_numba_kernel(), (chunks,), min(x.numel(), NUMBA_THREADS), x, y, partial, chunk)
        launch(numba_sum_chunks(), (1, 1), min(chunks, NUMBA_THREADS), partial, out.view(1, 1), chunks)


FORMS = {"triton": _triton, "cuda": _cuda, "numba": _numba}


def _fake(x: Tensor, y: Tensor, form: str) -> Tensor:
    return x.new_empty(())


@operator("dot", fake=_fake)
def dot_forward(x: Tensor, y: Tensor, form: str) -> Tensor:
    """The dot product of two vectors of one length and dtype."""
    if x.numel() == 0:
        return x.new_zeros(())
    out = x.new_empty(())
    FORMS[form](x.contiguous(), y.contiguous(), out)
    return out


def _save(ctx, inputs, output) -> None:
    x, y, _ = inputs
    ctx.save_for_backward(x, y)


@cached_plan
def _plan_backward(N: int, dtypes: Any, device: int, wanted: tuple[bool, ...]) -> Callable[..., None]:
    config = {"EVEN": N % BACKWARD_BLOCK == 0, "BLOCK_N": BACKWARD_BLOCK, "num_warps": 4}
    return _launch_backward.prepare((cdiv(N, BACKWARD_BLOCK),), N, **config)


def _gradients_like(x: Tensor, y: Tensor, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    return [contiguous_like(t) for t in itertools.compress((x, y), wanted)]


@operator("dot_backward", fake=_gradients_like)
def dot_backward(x: Tensor, y: Tensor, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """The wanted gradients of x and y, in one launch."""
    gradients = _gradients_like(x, y, grad, wanted)
    if x.numel():
        plan = _plan_backward(x.numel(), (x.dtype, grad.dtype), x.get_device(), tuple(wanted))
        plan(x.contiguous(), y.contiguous(), grad, *scatter(gradients, wanted))
    return gradients


def _backward(ctx, grad: Tensor):
    x, y = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    if torch.is_grad_enabled():  # double backward: torch differentiates this formula again
        return grad * y if wanted[0] else None, grad * x if wanted[1] else None
    return tuple(scatter(dot_backward(x, y, grad, wanted), wanted))


dot_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_dot(x: Tensor, y: Tensor) -> Tensor:
    return dot_forward(x, y, "triton")


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor, y: Tensor) -> Tensor:
    return dot_forward(x, y, "cuda")


@op.kernel("numba", language="numba", fits=lambda x, y: x.dtype == torch.float32, differentiable=False)
def numba(x: Tensor, y: Tensor) -> Tensor:
    return dot_forward(x, y, "numba")


CROSSOVER = Crossover("dot", faster_after(us=0.87, bytes_per_element=4))


def dot(input: Tensor, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Dot product, with the arguments of `torch.dot`."""
    if out is not None or not eligible_elementwise(CROSSOVER, input, tensor) or input.dim() != 1:
        return torch.dot(input, tensor, out=out)
    return dot_forward(input, tensor, "triton")


op.public(dot)
