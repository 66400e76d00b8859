"""Sum over dimensions: y = sum of x over each row.

The kernels are those of every reduction (`_reduce.py`); beside them, whole rows and pieces of rows in CUDA C++ and in
Numba.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.reduce._numba import NUMBA_THREADS, numba_sum_chunks
from tilewright.ops.reduce._operators import BENCH, CHECK, cost, reduce, reduced, split
from tilewright.runtime.cuda import Source
from tilewright.runtime.numba import launch
from tilewright.runtime.operator import operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Op


def reference(x: Tensor) -> Tensor:
    return torch.sum(x, dim=-1)


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=0, written=0)  # the incoming gradient, expanded without a copy


op = Op(
    "sum",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N"),),
    check=CHECK,
    bench=BENCH,
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_sum(x: Tensor) -> Tensor:
    return reduce(x, (1,), False, "sum")


CUDA = Source("reduce/sum.cu", "sum_whole", "sum_chunks", "sum_partials")
CUDA_THREADS = 256  # any number is right
CUDA_BLOCK = 16384  # pieces of rows are multiples of it


def _cuda(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    where = x.dtype, x.get_device()
    room = 4 * CUDA_THREADS  # bytes of shared memory: a float for each thread
    chunk, chunks = split(M, N, CUDA_BLOCK)
    if chunks == 1:
        lanes = min(CUDA_THREADS, next_power_of_2(cdiv(x.element_size() * N, 16)))
        blocks = cdiv(M, CUDA_THREADS // lanes)
        CUDA.prepare("sum_whole", *where, (blocks,), CUDA_THREADS, M, N, lanes, shared=room)(x, y)
        return
    partial = torch.empty(M, chunks, dtype=torch.float32, device=x.device)
    CUDA.prepare("sum_chunks", *where, (M, chunks), CUDA_THREADS, M, N, chunk, shared=room)(x, partial)
    CUDA.prepare("sum_partials", *where, (M,), CUDA_THREADS, M, chunks, shared=room)(partial, y)


NUMBA_BLOCK = 4096  # pieces of rows are multiples of it


def _numba(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    chunk, chunks = split(M, N, NUMBA_BLOCK)
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
    """The sum over the last dimension by the named form."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-1])
    y = x.new_empty(x.shape[:-1])
    FORMS[form](x.contiguous().view(-1, x.shape[-1]), y.view(-1))
    return y


def _save(ctx, inputs, output) -> None:
    ctx.shape = inputs[0].shape


def _backward(ctx, grad: Tensor):
    return grad.unsqueeze(-1).expand(ctx.shape), None


sum_rows.differentiate(_save, _backward)


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor) -> Tensor:
    return sum_rows(x, "cuda")


@op.kernel("numba", language="numba", fits=lambda x: x.dtype == torch.float32, differentiable=False)
def numba(x: Tensor) -> Tensor:
    return sum_rows(x, "numba")


@op.also
def of_columns(device: str) -> None:
    reduce(torch.empty(64, 4096, 256, dtype=torch.bfloat16, device=device), (1,), False, "sum")


SMALLEST = 2**20  # elements; below this torch takes less time than our call costs the host


def sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.sum`: the fast kernels where they fit, torch elsewhere."""
    y = reduced(SMALLEST, input, dim, keepdim, "sum", dtype=dtype)
    if y is not None:
        return y
    if dim is None and not keepdim:  # two overloads: some kinds of tensor have only this one
        return torch.sum(input, dtype=dtype)
    return torch.sum(input, dim, keepdim, dtype=dtype)


@op.public
def public(x: Tensor) -> Tensor:
    return sum(x, -1)
