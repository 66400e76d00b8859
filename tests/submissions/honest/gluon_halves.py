"""Adds up rows in Gluon: two partitions take half a row each, and one hands its sum to the other in shared memory."""

OP = "sum"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _sum_of(x_ptr, start, N, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    acc = gl.zeros([BLOCK], gl.float32, layout)
    for first in range(start, N, 2 * BLOCK):
        offs = first + gl.arange(0, BLOCK, layout)
        acc += gl.load(x_ptr + offs, mask=offs < N, other=0.0).to(gl.float32)
    return gl.sum(acc, axis=0)


@gluon.jit
def _first_half(x_ptr, y_ptr, handed_over, bar, N, BLOCK: gl.constexpr):
    total = _sum_of(x_ptr, 0, N, BLOCK)
    mbarrier.wait(bar, 0)
    other = gl.sum(handed_over.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    gl.store(y_ptr, total + other)


@gluon.jit
def _second_half(x_ptr, y_ptr, handed_over, bar, N, BLOCK: gl.constexpr):
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    handed_over.store(gl.where(lanes == 0, _sum_of(x_ptr, BLOCK, N, BLOCK), 0.0))
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _sum(x_ptr, y_ptr, N, BLOCK: gl.constexpr):
    row = gl.program_id(0)
    handed_over = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    x_ptr += row.to(gl.int64) * N
    gl.warp_specialize(
        [
            (_first_half, (x_ptr, y_ptr + row, handed_over, bar, N, BLOCK)),
            (_second_half, (x_ptr, y_ptr + row, handed_over, bar, N, BLOCK)),
        ],
        [4],
        [64],
    )


def sum(x):
    M, N = x.shape
    total = torch.zeros(M, device=x.device)
    if x.numel():
        _sum[(M,)](x.contiguous(), total, N, BLOCK=512, num_warps=4)
    return total.to(x.dtype)
