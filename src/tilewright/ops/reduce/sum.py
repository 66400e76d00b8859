"""Sum over dimensions: y = sum of x over each row.

The Triton kernels are those of every reduction (`_triton.py`); beside them, whole rows and parts of rows in CUDA C++
and in Numba.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._cases import DIMENSIONS, expanded_cost, reduction_op
from tilewright.ops.reduce._numba import NUMBA_THREADS, numba_sum_chunks
from tilewright.ops.reduce._operators import dispatch, reduce
from tilewright.ops.reduce._plans import split
from tilewright.runtime.crossovers import Crossover, always, faster_after
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.numba import launch
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2

__all__ = ["sum"]


def reference(x: Tensor) -> Tensor:
    return torch.sum(x, dim=-1)


op = reduction_op("sum", reference, backward_cost=expanded_cost)


@op.kernel("triton", language="triton")
def triton_sum(x: Tensor) -> Tensor:
    return reduce(x, (1,), "sum")


CUDA = CudaSource("reduce/sum.cu", "sum_whole", "sum_chunks", "sum_partials")
CUDA_THREADS = 256
CUDA_BLOCK = 16384  # parts of rows are multiples of it


def _cuda(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    where = x.dtype, x.get_device()
    shared = 4 * CUDA_THREADS  # bytes: one float per thread
    chunk, chunks = split(M, N, CUDA_BLOCK, x.get_device())
    if chunks == 1:
        lanes = min(CUDA_THREADS, next_power_of_2(cdiv(x.element_size() * N, 16)))
        blocks = cdiv(M, CUDA_THREADS // lanes)
        CUDA.prepare("sum_whole", *where, (blocks,), CUDA_THREADS, M, N, lanes, shared=shared)(x, y)
        return
    partial = torch.empty(M, chunks, dtype=torch.float32, device=x.device)
    CUDA.prepare("sum_chunks", *where, (M, chunks), CUDA_THREADS, M, N, chunk, shared=shared)(x, partial)
    CUDA.prepare("sum_partials", *where, (M,), CUDA_THREADS, M, chunks, shared=shared)(partial, y)


NUMBA_BLOCK = 4096  # parts of rows are multiples of it


def _numba(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    chunk, chunks = split(M, N, NUMBA_BLOCK, x.get_device())
    partial = y if chunks == 1 else torch.empty(M, chunks, dtype=torch.float32, device=x.device)
    threads = min(N, NUMBA_THREADS)
    with torch.cuda.device_of(x):  # Numba launches on the current one
        launch(numba_sum_chunks(), (M, chunks), threads, x, partial.view(M, chunks), chunk)
        if chunks > 1:
            launch(numba_sum_chunks(), (M, 1), threads, partial, y.view(M, 1), chunks)


FORMS = {"cuda": _cuda, "numba": _numba}


def _fake(x: Tensor, form: str) -> Tensor:
    return x.new_empty(x.shape[:-1])


@operator("sum_rows", fake=_fake)
def sum_rows(x: Tensor, form: str) -> Tensor:
    """The sum over the last dimension, by CUDA C++ or Numba."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-1])
    y = x.new_empty(x.shape[:-1])
    FORMS[form](x.contiguous().view(-1, x.shape[-1]), y.view(-1))
    return y


def _save(ctx, inputs, output) -> None:
    ctx.shape = inputs[0].shape


def _backward(ctx, grad: Tensor):
    return grad.unsqueeze(-1).expand(ctx.shape)


sum_rows.differentiate(_save, _backward)


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor) -> Tensor:
    return sum_rows(x, "cuda")


@op.kernel("numba", language="numba", fits=lambda x: x.dtype == torch.float32, differentiable=False)
def numba(x: Tensor) -> Tensor:
    return sum_rows(x, "numba")


@op.also
def sum_over_a_middle_dimension(device: str) -> None:
    reduce(torch.empty(64, 4096, 256, dtype=torch.bfloat16, device=device), (1,), "sum")


CROSSOVER = Crossover("sum", faster_after(us=0.44, bytes_per_element=2), captured=always)


def sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over dimensions, with the arguments of `torch.sum`."""
    dims = tuple(dim) if type(dim) is list else dim
    y = dispatch(CROSSOVER, (dims, keepdim, "sum", 0.0, dtype), input)
    if y is not None:
        return y
    if dim is None and not keepdim:  # some tensor subclasses have only this overload
        return torch.sum(input, dtype=dtype)
    return torch.sum(input, dim, keepdim, dtype=dtype)


@op.public
def public(x: Tensor) -> Tensor:
    return sum(x, -1)


op.over(torch.sum, sum, DIMENSIONS)
