"""Correct Gluon kernels: copies, a reduction, and matrix products from one partition to ping-pong."""

import pytest
import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

NEEDS = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the interpreter runs Gluon of Triton 3.6")
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor with the layout that TMA and wgmma prefer."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return integers so small that matrix products of them are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@gluon.jit
def _scale(x_ptr, y_ptr, n, factor, BLOCK: gl.constexpr):
    offs = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=ROW)
    x = gl.load(x_ptr + offs, mask=offs < n)
    gl.store(y_ptr + offs, x * factor, mask=offs < n)


def scale(x: Tensor, factor: float) -> Tensor:
    y = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), factor, BLOCK=256, num_warps=4)
    return y


@gluon.jit
def _row_sums(x_ptr, y_ptr, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    offs_m = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, TILE))
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = gl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    sums = gl.convert_layout(gl.sum(x, axis=1), ROW)
    rows = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
    gl.store(y_ptr + rows, sums, mask=rows < M)


def row_sums(x: Tensor) -> Tensor:
    y = torch.empty(len(x))
    _row_sums[(triton.cdiv(len(x), 32),)](x, y, *x.shape, BLOCK_M=32, BLOCK_N=64, num_warps=4)
    return y


@gluon.jit
def _transpose(x_ptr, y_ptr, M: gl.constexpr, N: gl.constexpr):
    """Transpose through shared memory, once as a view and once in registers."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [M, N], shared)
    offs_m = gl.arange(0, M, gl.SliceLayout(1, TILE))
    offs_n = gl.arange(0, N, gl.SliceLayout(0, TILE))
    async_copy.async_copy_global_to_shared(buffer, x_ptr + offs_m[:, None] * N + offs_n[None, :])
    async_copy.commit_group()
    async_copy.wait_group(0)
    turned = buffer.permute((1, 0)).load(TILE) + gl.convert_layout(buffer.load(TILE).trans(), TILE)
    rows = gl.arange(0, N, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, M, gl.SliceLayout(0, TILE))
    gl.store(y_ptr + rows[:, None] * M + columns[None, :], turned)


def twice_transposed(x: Tensor) -> Tensor:
    y = torch.empty(x.T.shape)
    _transpose[(1,)](x, y, *x.shape, num_warps=4)
    return y


@gluon.jit
def _ring(desc, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005  Triton's tuple
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def _tma_copy(x_desc, y_desc, columns, STAGES: gl.constexpr):
    """Copy a row of tiles through a ring of buffers that TMA fills and empties."""
    N: gl.constexpr = x_desc.block_type.shape[1]
    row = gl.program_id(0) * x_desc.block_type.shape[0]
    buffers = _ring(x_desc, STAGES)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    tiles = gl.cdiv(columns, N)
    for i in range(tiles + STAGES - 1):
        stage = i % STAGES
        tma.store_wait(0)  # the buffer is free
        mbarrier.expect(bars.index(stage), x_desc.block_type.nbytes, pred=i < tiles)
        tma.async_copy_global_to_shared(x_desc, [row, i * N], bars.index(stage), buffers.index(stage), pred=i < tiles)
        done = i - (STAGES - 1)
        if done >= 0:
            mbarrier.wait(bars.index(done % STAGES), done // STAGES & 1)
            tma.async_copy_shared_to_global(y_desc, [row, done * N], buffers.index(done % STAGES))
    tma.store_wait(0)


def tma_copy(x: Tensor, stages: int) -> Tensor:
    y = torch.empty_like(x)
    grid = (triton.cdiv(len(x), 16),)
    _tma_copy[grid](descriptor(x, [16, 32]), descriptor(y, [16, 32]), x.shape[1], STAGES=stages, num_warps=4)
    return y


@gluon.jit
def _store_tile(acc, c_desc, off_m, off_n):
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    c.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [off_m, off_n], c)
    tma.store_wait(0)


@gluon.jit
def _load_tiles(a_desc, b_desc, a, b, bars, off_m, off_n, step, pred, STAGES: gl.constexpr):
    bar = bars.index(step % STAGES)
    k = step * a_desc.block_type.shape[1]
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(a_desc, [off_m, k], bar, a.index(step % STAGES), pred=pred)
    tma.async_copy_global_to_shared(b_desc, [k, off_n], bar, b.index(step % STAGES), pred=pred)


@gluon.jit
def _pipelined(a_desc, b_desc, c_desc, STAGES: gl.constexpr):
    """One partition: the loads run STAGES - 1 steps before the wgmma, which is asynchronous."""
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    off_m, off_n = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    a = _ring(a_desc, STAGES)
    b = _ring(b_desc, STAGES)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = warpgroup_mma_init(gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout))
    steps = gl.cdiv(a_desc.shape[1], BLOCK_K)
    for step in gl.static_range(STAGES - 1):
        _load_tiles(a_desc, b_desc, a, b, bars, off_m, off_n, step, step < steps, STAGES)
    for step in range(steps):
        mbarrier.wait(bars.index(step % STAGES), step // STAGES & 1)
        acc = warpgroup_mma_wait(0, deps=(acc,))  # the buffer of the step before is free
        acc = warpgroup_mma(a.index(step % STAGES), b.index(step % STAGES), acc, is_async=True)
        ahead = step + STAGES - 1
        _load_tiles(a_desc, b_desc, a, b, bars, off_m, off_n, ahead, ahead < steps, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _store_tile(acc, c_desc, off_m, off_n)


@aggregate
class Ring:
    """A position in a ring of buffers, and the parity of the round."""

    index: gl.tensor
    phase: gl.tensor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, index, phase, stages):
        self.index = index
        self.phase = phase
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def start(phase, stages: gl.constexpr):  # noqa: N805  a static method
        return Ring(gl.to_tensor(0), gl.to_tensor(phase), stages)

    @gluon.jit
    def next(self):
        wraps = self.index + 1 == self.stages
        return Ring(gl.where(wraps, 0, self.index + 1), gl.where(wraps, self.phase ^ 1, self.phase), self.stages)


@gluon.jit
def _produce(a_desc, b_desc, buffers, bars, off_m, off_n, STAGES: gl.constexpr):
    a, b = buffers
    full, empty = bars
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    ring = Ring.start(1, STAGES)
    for k in range(0, a_desc.shape[1], BLOCK_K):
        mbarrier.wait(empty.index(ring.index), ring.phase)
        mbarrier.expect(full.index(ring.index), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(a_desc, [off_m, k], full.index(ring.index), a.index(ring.index))
        tma.async_copy_global_to_shared(b_desc, [k, off_n], full.index(ring.index), b.index(ring.index))
        ring = ring.next()


@gluon.jit
def _consume(a_desc, c_desc, buffers, bars, off_m, off_n, STAGES: gl.constexpr):
    a, b = buffers
    full, empty = bars
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    ring = Ring.start(0, STAGES)
    for _ in range(0, a_desc.shape[1], a_desc.block_type.shape[1]):
        mbarrier.wait(full.index(ring.index), ring.phase)
        acc = warpgroup_mma(a.index(ring.index), b.index(ring.index), acc)
        mbarrier.arrive(empty.index(ring.index), count=1)
        ring = ring.next()
    _store_tile(acc, c_desc, off_m, off_n)


@gluon.jit
def _specialized(a_desc, b_desc, c_desc, STAGES: gl.constexpr):
    """Two partitions: one issues TMA loads, the other multiplies."""
    off_m, off_n = gl.program_id(0) * c_desc.block_type.shape[0], gl.program_id(1) * c_desc.block_type.shape[1]
    a = _ring(a_desc, STAGES)
    b = _ring(b_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (_consume, (a_desc, c_desc, (a, b), (full, empty), off_m, off_n, STAGES)),
            (_produce, (a_desc, b_desc, (a, b), (full, empty), off_m, off_n, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _produce_tiles(a_desc, b_desc, buffers, bars, tiles, tiles_n, STAGES: gl.constexpr):
    a, b = buffers
    full, empty, _ = bars
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[1]
    ring = Ring.start(1, STAGES)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(0, a_desc.shape[1], BLOCK_K):
            mbarrier.wait(empty.index(ring.index), ring.phase)
            bar = full.index(ring.index)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [tile // tiles_n * BLOCK_M, k], bar, a.index(ring.index))
            tma.async_copy_global_to_shared(b_desc, [k, tile % tiles_n * BLOCK_N], bar, b.index(ring.index))
            ring = ring.next()


@gluon.jit
def _consume_tiles(a_desc, c_desc, buffers, bars, tiles, tiles_n, STAGES: gl.constexpr, ROLE: gl.constexpr):
    """Take every second tile: one consumer multiplies while the other is in its epilogue."""
    a, b = buffers
    full, empty, turn = bars
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    steps = gl.cdiv(a_desc.shape[1], a_desc.block_type.shape[1])
    number = 0
    for tile in range(gl.program_id(0) + ROLE * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        mbarrier.wait(turn.index(ROLE), number & 1 ^ (1 - ROLE))  # consumer 0 begins
        acc = warpgroup_mma_init(gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout))
        first = (2 * number + ROLE) * steps
        for step in range(first, first + steps):
            mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
            acc = warpgroup_mma(a.index(step % STAGES), b.index(step % STAGES), acc, is_async=True)
            warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > first)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((first + steps - 1) % STAGES), count=1)
        mbarrier.arrive(turn.index(1 - ROLE), count=1)
        _store_tile(acc, c_desc, tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N)
        number += 1  # noqa: SIM113


@gluon.jit
def _ping_pong(a_desc, b_desc, c_desc, tiles, tiles_n, STAGES: gl.constexpr):
    """Three partitions and a persistent grid: two consumers alternate, one producer feeds them."""
    a = _ring(a_desc, STAGES)
    b = _ring(b_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for role in gl.static_range(2):
        mbarrier.init(turn.index(role), count=1)
    bars = (full, empty, turn)
    gl.warp_specialize(
        [
            (_consume_tiles, (a_desc, c_desc, (a, b), bars, tiles, tiles_n, STAGES, 0)),
            (_consume_tiles, (a_desc, c_desc, (a, b), bars, tiles, tiles_n, STAGES, 1)),
            (_produce_tiles, (a_desc, b_desc, (a, b), bars, tiles, tiles_n, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )


def matmul(form: str, a: Tensor, b: Tensor, stages: int = 3, block: tuple[int, int, int] = (64, 64, 32)) -> Tensor:
    """Multiply with one of the kernels: pipelined, specialized or ping-pong."""
    BLOCK_M, BLOCK_N, BLOCK_K = block
    c = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    descriptors = [
        descriptor(x, [m, n]) for x, m, n in ((a, BLOCK_M, BLOCK_K), (b, BLOCK_K, BLOCK_N), (c, BLOCK_M, BLOCK_N))
    ]
    tiles_m, tiles_n = triton.cdiv(len(a), BLOCK_M), triton.cdiv(b.shape[1], BLOCK_N)
    if form == "ping-pong":
        _ping_pong[(2,)](*descriptors, tiles_m * tiles_n, tiles_n, STAGES=stages, num_warps=4)
    else:
        kernel = {"pipelined": _pipelined, "specialized": _specialized}[form]
        kernel[tiles_m, tiles_n](*descriptors, STAGES=stages, num_warps=4)
    return c
