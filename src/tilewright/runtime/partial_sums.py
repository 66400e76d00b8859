"""Split reductions of parameter gradients: each program writes partial sums, and a second kernel adds them."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.pdl import dependent_launch, wait_for_previous
from tilewright.runtime.sizes import cdiv, next_power_of_2

MAX_BLOCK_P, BLOCK_N = 512, 16  # partial sums and columns that one program adds per step


@triton.jit
def _sum_columns(partials_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        offs = offs_p[:, None].to(tl.int64) * N + offs_n[None, :]  # [BLOCK_P, BLOCK_N]
        total += tl.load(partials_ptr + offs, mask=(offs_p < P)[:, None] & (offs_n < N)[None, :], other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _sum_partials(
    partials_ptr, out_ptr, more_partials_ptr, more_out_ptr, P, N,
    WAITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[N] = the sum of partials [P, N]; a second parameter's partials are summed by programs of their own."""
    wait_for_previous(WAITS)
    if tl.program_id(1) == 0:
        _sum_columns(partials_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
    if more_out_ptr is not None:  # noqa: SIM102  decided at compile time
        if tl.program_id(1) == 1:
            _sum_columns(more_partials_ptr, more_out_ptr, P, N, BLOCK_P, BLOCK_N)


_launch = Launcher(_sum_partials)


def sum_partials(splits: int, N: int, gradients: int, device: int) -> PreparedLaunch:
    """Sum the partial gradients [splits, N] of one or two parameters into their gradients.

    The launch takes the partials and the gradient of each parameter; None, None for a missing second one.
    """
    block_p = min(MAX_BLOCK_P, next_power_of_2(splits))
    block_n = BLOCK_N if N > 2048 else BLOCK_N // 2  # enough programs to fill the GPU
    config = {"BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": 8, **dependent_launch(device)}
    return _launch.prepare((cdiv(N, block_n), gradients), splits, N, **config)
