"""Simple kernels shared by several tests."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def copy(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _copy[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


@triton.jit
def _copy_too_much(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs), mask=offs < n)


def copy_too_much(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _copy_too_much[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, TILE: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0)
        b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=inside)


def matmul(a: Tensor, b: Tensor, tile: int = 32) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N))
    _matmul[(triton.cdiv(M, tile), triton.cdiv(N, tile))](a, b, c, M, N, K, TILE=tile, BLOCK_K=16)
    return c


@triton.jit
def _column(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs * stride))


def column(x: Tensor) -> Tensor:
    """Copy the first column of a row-major matrix: every element lies in a sector of its own."""
    y = torch.empty(x.shape[0])
    _column[(1,)](x, y, x.stride(0), BLOCK=x.shape[0])
    return y


@triton.jit
def _endless_loop(x_ptr):
    while tl.load(x_ptr) > -1000.0:
        tl.store(x_ptr, 0.0)


def endless_loop(x: Tensor) -> Tensor:
    _endless_loop[(1,)](x)
    return x


@triton.jit
def _assembly(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + offs, y)


def assembly(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _assembly[(1,)](x, y, BLOCK=64)
    return y


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y_ptr + offs, 2 * tl.load(x_ptr + offs))
    else:
        tl.store(y_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def double(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


def two_launches(x: Tensor) -> Tensor:
    return copy(double(x))


PLAIN = 3


@triton.jit
def _plain_global(x_ptr):
    tl.store(x_ptr, PLAIN)


@triton.jit
def _asserting(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "positive")
