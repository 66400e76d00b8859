"""Elementwise sum of two tensors: out = x + y.

The simplest kernel: three memory accesses and one operation per element. All that matters is that accesses are 16 bytes
wide, that several are in flight, and that offsets may exceed 2**31.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover, never
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.elementwise import eligible_elementwise
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.numba import launch, numba_cuda
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Op, grid

__all__ = ["add"]


def reference(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y)


def cost(x: Tensor, y: Tensor) -> Cost:
    return Cost(read=x.nbytes + y.nbytes, written=x.nbytes, flops={"fp32": x.numel()})


def backward_cost(x: Tensor, y: Tensor) -> Cost:
    return Cost(read=0, written=0)  # the incoming gradient is that of both inputs


op = Op(
    "add",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("N"), draw.randn("N")),
    check=grid(N=(1, 2, 509, 4096, 200003)),
    bench=grid(N=(2**20, 2**24, 2**28)),
    backward_cost=backward_cost,
    batch="N",
)


@triton.jit
def _add_fwd(x_ptr, y_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK_N  # int64: N may exceed 2**31
    offs_n = start + tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= N:  # without a mask accesses stay 16 bytes wide for every N
        x = tl.load(x_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(y_ptr + offs_n, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr + offs_n, (x + y).to(out_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(y_ptr + offs_n, mask=offs_n < N, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr + offs_n, (x + y).to(out_ptr.dtype.element_ty), mask=offs_n < N)


BLOCK_N = 2048


_launch = Launcher(_add_fwd)


@cached_plan
def _plan(N: int, dtype: torch.dtype, device: int) -> PreparedLaunch:
    return _launch.prepare((cdiv(N, BLOCK_N),), N, BLOCK_N=BLOCK_N, num_warps=4)


def _triton(x: Tensor, y: Tensor, out: Tensor) -> None:
    _plan(x.numel(), x.dtype, x.get_device())(x, y, out)


CUDA = CudaSource("add.cu", "add_fwd")
CUDA_THREADS = 256
CUDA_BYTES = 32  # per thread, step and input


def _cuda(x: Tensor, y: Tensor, out: Tensor) -> None:
    blocks = cdiv(x.nbytes, CUDA_THREADS * CUDA_BYTES)
    CUDA.prepare("add_fwd", x.dtype, x.get_device(), (blocks,), CUDA_THREADS, x.numel())(x, y, out)


NUMBA_THREADS = 128
NUMBA_EACH = 4  # elements per thread


@functools.cache
def _numba_kernel() -> Any:
    global nb
    nb = numba_cuda()

    @nb.jit
    def add(x, y, out):
        width = nb.blockDim.x
        n = nb.blockIdx.x * width * NUMBA_EACH + nb.threadIdx.x
        if n + 3 * width < out.size:  # all loads before the first store, so that they are in flight together
            a, b = x[n] + y[n], x[n + width] + y[n + width]
            c, d = x[n + 2 * width] + y[n + 2 * width], x[n + 3 * width] + y[n + 3 * width]
            out[n], out[n + width] = a, b
            out[n + 2 * width], out[n + 3 * width] = c, d
        else:
            for m in range(n, min(n + NUMBA_EACH * width, out.size), width):
                out[m] = x[m] + y[m]

    return add


def _numba(x: Tensor, y: Tensor, out: Tensor) -> None:
    blocks = cdiv(x.numel(), NUMBA_THREADS * NUMBA_EACH)
    launch(_numba_kernel(), (blocks,), NUMBA_THREADS, x.view(-1), y.view(-1), out.view(-1))


FORMS = {"triton": _triton, "cuda": _cuda, "numba": _numba}


@operator("add", fake=contiguous_like)
def add_forward(x: Tensor, y: Tensor, form: str) -> Tensor:
    """The sum of two tensors of one shape and dtype."""
    out = contiguous_like(x)
    if x.numel():
        FORMS[form](x.contiguous(), y.contiguous(), out)
    return out


def _save(ctx, inputs, output) -> None:
    """The gradient needs no input."""


def _backward(ctx, grad: Tensor):
    return grad, grad


add_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_add(x: Tensor, y: Tensor) -> Tensor:
    return add_forward(x, y, "triton")


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor, y: Tensor) -> Tensor:
    return add_forward(x, y, "cuda")


@op.kernel("numba", language="numba", fits=lambda x, y: x.dtype == torch.float32, differentiable=False)
def numba(x: Tensor, y: Tensor) -> Tensor:
    return add_forward(x, y, "numba")


CROSSOVER = Crossover("add", never)


def add(input: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    """Elementwise sum, with the arguments of `torch.add`."""
    plain = out is None and type(alpha) in (int, float) and alpha == 1
    # Inductor fuses torch's add with its neighbors, but not our operator.
    if torch.compiler.is_compiling() or not plain or not eligible_elementwise(CROSSOVER, input, other):
        return torch.add(input, other, alpha=alpha, out=out)
    return add_forward(input, other, "triton")
