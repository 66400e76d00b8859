"""Gradients of what many rows share: programs leave a share each, and a kernel that follows adds them up."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.runtime.launch import Launcher, Prepared
from tilewright.runtime.pdl import await_leader, following
from tilewright.runtime.sizes import cdiv, next_power_of_2

SHARES, COLUMNS = 512, 16  # at most so many shares, of so many columns, does a program add up at a time


@triton.jit
def _sum_shares(shares_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        offs = offs_p[:, None].to(tl.int64) * N + offs_n[None, :]  # [BLOCK_P, BLOCK_N]
        total += tl.load(shares_ptr + offs, mask=(offs_p < P)[:, None] & (offs_n < N)[None, :], other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _sum_all(
    shares_ptr, out_ptr, more_shares_ptr, more_out_ptr, P, N,
    FOLLOWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[N] = the sum of shares [P, N], of one gradient and, by programs of its own, of another."""
    await_leader(FOLLOWS)
    if tl.program_id(1) == 0:
        _sum_shares(shares_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
    if more_out_ptr is not None:  # noqa: SIM102  settled when compiled
        if tl.program_id(1) == 1:
            _sum_shares(more_shares_ptr, more_out_ptr, P, N, BLOCK_P, BLOCK_N)


_launch = Launcher(_sum_all)


def add_up(shares: int, N: int, gradients: int, device: int) -> Prepared:
    """Of shares [shares, N] of one or two gradients, each followed by its gradient: their sums."""
    tile = min(SHARES, next_power_of_2(shares))
    columns = COLUMNS if N > 2048 else COLUMNS // 2  # so that there are programs enough
    grid = (cdiv(N, columns), gradients)
    config = {"BLOCK_P": tile, "BLOCK_N": columns, "num_warps": 8, **following(device)}
    return _launch.prepare(grid, shares, N, **config)
