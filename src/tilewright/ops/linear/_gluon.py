"""GEMM kernels in Gluon for Hopper: TMA copies, wgmma, mbarriers and warp specialization.

Slices of a and b, BLOCK_K deep, pass through a ring of STAGES slots in shared memory. `full` barriers say that a slice
has arrived, `empty` ones that a slot may be overwritten; the phase of a barrier flips each time it completes, so slot
and phase travel together. The grid is persistent: a program takes every `num_programs`-th tile, in an order that
shares rows of a and columns of b in L2.

a is stored [M, K], or [K, M] if TRANSPOSED_A; b is stored [K, N], or [N, K] if TRANSPOSED_B. Both are 16-bit floats.
TMA fills what is out of bounds with zeros and leaves it out when it stores, so the kernels have no boundary masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.ops.activation._unary import activation_of
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import DescribedLaunch, Matrix, stored
from tilewright.runtime.sizes import cdiv

BYTES = gl.constexpr(2)  # per element of a and b
UPPER, LOWER, HALVES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # parts of a tile
FIRST, SECOND, WHOLE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(1)  # two consumers that take turns


@gluon.jit
def _tile_at(index, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Return the row and column of a tile: groups of GROUP_M rows, column by column."""
    tiles_in_group = GROUP_M * tiles_n
    first_m = index // tiles_in_group * GROUP_M
    rows = gl.minimum(tiles_m - first_m, GROUP_M)
    index = index % tiles_in_group
    return first_m + index % rows, index // rows


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _slot_before(slot, STAGES: gl.constexpr):
    # Computed, since Triton 3.6 does not carry a variable over a loop whose body assigns `previous = slot`.
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def _barriers(ARRIVALS: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT barriers, each of which completes after this many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def _slots(desc, COUNT: gl.constexpr):
    """Return shared memory for this many blocks of a descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005  Gluon has no unpacking
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def _load(desc, start, start_k, barrier, slot, pred, BY_COLUMNS: gl.constexpr):
    """Copy a slice, whose rows lie in memory one after the other unless BY_COLUMNS."""
    if BY_COLUMNS:
        tma.async_copy_global_to_shared(desc, [start_k, start], barrier, slot, pred=pred)
    else:
        tma.async_copy_global_to_shared(desc, [start, start_k], barrier, slot, pred=pred)


@gluon.jit
def _multiply_slot(a, b, acc, use_acc, TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr):
    """Start acc += a b, and return once the multiplication before it is done."""
    if TRANSPOSED_A:
        a = a.permute((1, 0))
    if TRANSPOSED_B:
        b = b.permute((1, 0))
    acc = warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=1, deps=(acc,))


@gluon.jit
def _column_blocks(x, COUNT: gl.constexpr):
    """Return blocks of columns of x as a tuple. Each thread holds its columns in order, so no data moves."""
    if COUNT == 1:
        return (x,)
    else:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        return _column_blocks(left, COUNT // 2) + _column_blocks(right, COUNT // 2)


@gluon.jit
def _store_tile(acc, c_desc, c_smem, bias_ptr, residual_ptr, start_m, start_n, M, N, ACTIVATION: gl.constexpr):
    """Store activation(acc + bias) + residual through shared memory, block by block.

    The copies run on while the caller continues. The residual is contiguous.
    """
    BLOCK: gl.constexpr = c_desc.block_type.shape[1]
    COUNT: gl.constexpr = acc.shape[1] // BLOCK
    BUFFERS: gl.constexpr = c_smem.shape[0]
    blocks = _column_blocks(acc, COUNT)
    for i in gl.static_range(COUNT):
        block = blocks[i]
        offs_n = start_n + i * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, block.type.layout))
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)
            block += gl.expand_dims(bias, 0)
        if ACTIVATION != "none":
            block = activation_of(block, ACTIVATION, 16)
        if residual_ptr is not None:
            offs_m = start_m + gl.arange(0, block.shape[0], gl.SliceLayout(1, block.type.layout))
            inside = gl.expand_dims(offs_m < M, 1) & gl.expand_dims(offs_n < N, 0)
            offs = gl.expand_dims(offs_m.to(gl.int64) * N, 1) + gl.expand_dims(offs_n, 0)  # [rows, BLOCK]
            block += gl.load(residual_ptr + offs, mask=inside, other=0.0).to(gl.float32)
        tma.store_wait(pendings=BUFFERS - 1)  # the copy that last used this buffer has read it
        buffer = c_smem.index(i % BUFFERS)
        buffer.store(block.to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [start_m, start_n + i * BLOCK], buffer)


@gluon.jit
def _prefetch(
    a_desc, b_desc, a_smem, b_smem, full, slot, tile, tile_m, tile_n, start_k, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr,
):  # fmt: skip
    """Start the copies of one slice, and return the slot, tile and start_k of the next one."""
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    pred = tile < tiles_m * tiles_n
    barrier = full.index(slot)
    mbarrier.expect(barrier, (BLOCK_M + BLOCK_N) * BLOCK_K * BYTES, pred=pred)
    _load(a_desc, tile_m * BLOCK_M, start_k, barrier, a_smem.index(slot), pred, TRANSPOSED_A)
    _load(b_desc, tile_n * BLOCK_N, start_k, barrier, b_smem.index(slot), pred, not TRANSPOSED_B)
    slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    start_k += BLOCK_K
    if start_k >= K:
        start_k = 0
        tile += gl.num_programs(0)
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
    return slot, tile, tile_m, tile_n, start_k


@gluon.jit
def _matmul_pipelined(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, STORE_BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """All warps do everything: wait for a slice, multiply it, and start the copies into the slot before it.

    Copies and wgmma are asynchronous, so a single stream of instructions keeps both busy, except while it stores a
    tile.
    """
    a_smem, b_smem, c_smem = _slots(a_desc, STAGES), _slots(b_desc, STAGES), _slots(c_desc, STORE_BUFFERS)
    full = _barriers(1, STAGES)
    fence_async_shared()
    layout: gl.constexpr = gl.NVMMADistributedLayout(  # pyright: ignore[reportAssignmentType]
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)

    next_slot, next_tile, next_k = 0, gl.program_id(0), 0
    next_m, next_n = _tile_at(next_tile, tiles_m, tiles_n, GROUP_M)
    for _ in gl.static_range(STAGES):
        next_slot, next_tile, next_m, next_n, next_k = _prefetch(
            a_desc, b_desc, a_smem, b_smem, full, next_slot, next_tile, next_m, next_n, next_k, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B,
        )  # fmt: skip
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        for start_k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            acc = _multiply_slot(a_smem.index(slot), b_smem.index(slot), acc, start_k > 0, TRANSPOSED_A, TRANSPOSED_B)
            slot, phase = _next_slot(slot, phase, STAGES)
            if start_k > 0:  # the slot before this one may be overwritten
                next_slot, next_tile, next_m, next_n, next_k = _prefetch(
                    a_desc, b_desc, a_smem, b_smem, full, next_slot, next_tile, next_m, next_n, next_k, M, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B,
                )  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        next_slot, next_tile, next_m, next_n, next_k = _prefetch(
            a_desc, b_desc, a_smem, b_smem, full, next_slot, next_tile, next_m, next_n, next_k, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B,
        )  # fmt: skip
        _store_tile(
            acc, c_desc, c_smem, bias_ptr, residual_ptr, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, ACTIVATION
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def _produce(
    a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The producer: copy the slices of all tiles of this program, as slots become empty.

    A slice of a is copied in this many parts, one for each consumer that multiplies it.
    """
    ROWS: gl.constexpr = BLOCK_M // PARTS
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    slot, phase = 0, 1  # all slots are empty
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
        for start_k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            barrier = full.index(slot)
            mbarrier.expect(barrier, (BLOCK_M + BLOCK_N) * BLOCK_K * BYTES)
            for part in gl.static_range(PARTS):
                start_m = tile_m * BLOCK_M + part * ROWS
                _load(a_desc, start_m, start_k, barrier, a_smem.index(slot * PARTS + part), True, TRANSPOSED_A)
            _load(b_desc, tile_n * BLOCK_N, start_k, barrier, b_smem.index(slot), True, not TRANSPOSED_B)
            slot, phase = _next_slot(slot, phase, STAGES)


@gluon.jit
def _multiply_tile(
    a_smem, b_smem, full, empty, slot, phase, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Return a tile, or a part of it, and the slot and phase after it.

    A slot is given back one step late, when its wgmma is done, so that there is always one in flight.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(  # pyright: ignore[reportAssignmentType]
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros([BLOCK_M // PARTS, BLOCK_N], gl.float32, layout)
    for start_k in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        a, b = a_smem.index(slot * PARTS + PART), b_smem.index(slot)
        acc = _multiply_slot(a, b, acc, start_k > 0, TRANSPOSED_A, TRANSPOSED_B)
        mbarrier.arrive(empty.index(_slot_before(slot, STAGES)), count=1, pred=start_k > 0)
        slot, phase = _next_slot(slot, phase, STAGES)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(_slot_before(slot, STAGES)), count=1)
    return acc, slot, phase


@gluon.jit
def _consume_half(
    c_desc, bias_ptr, residual_ptr, a_smem, b_smem, c_smem, full, empty, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, ACTIVATION: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """A cooperative consumer: the upper or the lower half of every tile of this program."""
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
        acc, slot, phase = _multiply_tile(
            a_smem, b_smem, full, empty, slot, phase, K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED_A, TRANSPOSED_B, HALVES, PART,
        )  # fmt: skip
        start_m = tile_m * BLOCK_M + PART * (BLOCK_M // 2)
        _store_tile(acc, c_desc, c_smem, bias_ptr, residual_ptr, start_m, tile_n * BLOCK_N, M, N, ACTIVATION)
    tma.store_wait(pendings=0)


@gluon.jit
def _matmul_cooperative(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, STORE_BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One warp copies, and two warpgroups multiply: each has half of every tile.

    No warp that multiplies ever spends an instruction on a copy, and the copies run ahead across tiles while the
    consumers store one. The consumers share nothing but the slots, so one may store its half while the other still
    multiplies. The producer gives its registers to the consumers.
    """
    a_smem, b_smem = _slots(a_desc, 2 * STAGES), _slots(b_desc, STAGES)
    c_smem, other_c_smem = _slots(c_desc, STORE_BUFFERS), _slots(c_desc, STORE_BUFFERS)
    full, empty = _barriers(1, STAGES), _barriers(2, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_half, (
                c_desc, bias_ptr, residual_ptr, a_smem, b_smem, c_smem, full, empty, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B, ACTIVATION, UPPER,
            )),
            (_consume_half, (
                c_desc, bias_ptr, residual_ptr, a_smem, b_smem, other_c_smem, full, empty, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B, ACTIVATION, LOWER,
            )),
            (_produce, (
                a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B, HALVES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _consume_every_second(
    c_desc, bias_ptr, residual_ptr, a_smem, b_smem, c_smem, full, empty, turns, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, ACTIVATION: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A ping-pong consumer: every second tile of this program, from its first or its second one on."""
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    passed = ORDER * steps  # slices of a and b before the next tile
    turn = 1 - ORDER  # the first consumer begins at once
    first_tile = gl.program_id(0) + ORDER * gl.num_programs(0)
    for tile in range(first_tile, tiles_m * tiles_n, 2 * gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n, GROUP_M)
        mbarrier.wait(turns.index(ORDER), turn)
        acc, _, _ = _multiply_tile(
            a_smem, b_smem, full, empty, passed % STAGES, (passed // STAGES) & 1, K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED_A, TRANSPOSED_B, WHOLE, 0,
        )  # fmt: skip
        mbarrier.arrive(turns.index(1 - ORDER), count=1)
        turn ^= 1
        passed += 2 * steps
        _store_tile(
            acc, c_desc, c_smem, bias_ptr, residual_ptr, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, ACTIVATION
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def _matmul_pingpong(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, STORE_BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One warp copies, and two warpgroups take turns: one multiplies a tile while the other stores the one before.

    The tensor cores never wait for a store, but a warpgroup must hold a whole tile in registers, so tiles are smaller
    and their slices are read from L2 more often.
    """
    a_smem, b_smem = _slots(a_desc, STAGES), _slots(b_desc, STAGES)
    c_smem, other_c_smem = _slots(c_desc, STORE_BUFFERS), _slots(c_desc, STORE_BUFFERS)
    full, empty, turns = _barriers(1, STAGES), _barriers(1, STAGES), _barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_every_second, (
                c_desc, bias_ptr, residual_ptr, a_smem, b_smem, c_smem, full, empty, turns, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B, ACTIVATION, FIRST,
            )),
            (_consume_every_second, (
                c_desc, bias_ptr, residual_ptr, a_smem, b_smem, other_c_smem, full, empty, turns, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B, ACTIVATION, SECOND,
            )),
            (_produce, (
                a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, TRANSPOSED_A, TRANSPOSED_B, WHOLE,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


KERNELS: dict[str, Any] = {
    "pipelined": _matmul_pipelined,
    "cooperative": _matmul_cooperative,
    "pingpong": _matmul_pingpong,
}
WARPS = {"pipelined": 8, "cooperative": 4, "pingpong": 4}  # in a program or, if it is specialized, in its first role


def _config(m: int, n: int, k: int, stages: int, group: int, store_n: int, store_buffers: int) -> Config:
    sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "STAGES": stages, "GROUP_M": group}
    return {**sizes, "STORE_N": store_n, "STORE_BUFFERS": store_buffers}


def _specialized(config: Config, consumer: int = 232, producer: int = 40) -> Config:
    return {**config, "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer}


def _default(kernel: str, M: int, N: int, K: int) -> Config:
    if kernel == "pipelined":
        return _config(128, 256, 64, 4, 8, 64, 1)
    if kernel == "cooperative":
        return _specialized(_config(128, 256, 64, 4, 8, 64, 2))
    return _specialized(_config(128, 128, 64, 6, 8, 64, 1))


def _choices(kernel: str, M: int, N: int, K: int) -> list[Config]:
    tiles = ((128, 128, 64, 6), (64, 256, 64, 4)) if kernel == "pingpong" else ((128, 256, 64, 4), (256, 128, 64, 4))
    plain = [_config(*tile, group, 64, 1) for tile in tiles for group in (4, 8, 16)]
    return plain if kernel == "pipelined" else [_specialized(one) for one in plain]


CONFIG = ConfigTable("matmul.json", _default, _choices)


def runs_on(device: int) -> bool:
    """Return whether the GPU of this number is a Hopper, whose instructions these kernels use, or interpreted."""
    return device < 0 or torch.cuda.get_device_capability(device) == (9, 0)


def busy_share(M: int, N: int, device: int) -> float:
    """Return the mean share of the SMs that have a tile of the cooperative kernel, since the last ones are few."""
    config = _default("cooperative", M, N, 0)
    tiles, sms = cdiv(M, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"]), gpu_facts(device).sms
    return tiles / (cdiv(tiles, sms) * sms)


@cached_plan
def _plan(
    kernel: str,
    sizes: tuple[int, int, int],
    steps: tuple[int, int],
    transposed: tuple[bool, bool],
    dtype: torch.dtype,
    device: int,
    activation: str,
    has_bias: bool,
    has_residual: bool,
) -> DescribedLaunch:
    """Return the launch that takes a [M, K] and b [K, N], with rows this many elements apart, c, bias and residual."""
    M, N, K = sizes
    config = dict(CONFIG(device, kernel, M, N, K))
    block_m, block_n, block_k = (config[f"BLOCK_{size}"] for size in "MNK")
    rows = block_m // 2 if kernel == "cooperative" else block_m  # one consumer takes this many of a and c
    store_n = config.pop("STORE_N")

    def laid_out(matrix: Matrix) -> Matrix:
        return matrix._replace(layout=gl.NVMMASharedLayout.get_default_for([*matrix.block], GLUON_DTYPES[dtype]))

    matrices = (
        laid_out(stored((M, K), steps[0], (rows, block_k), transposed[0])),
        laid_out(stored((K, N), steps[1], (block_k, block_n), transposed[1])),
        laid_out(Matrix((M, N), N, (rows, store_n))),
        None,
        None,
    )
    programs = min(gpu_facts(device).sms, cdiv(M, block_m) * cdiv(N, block_n))
    return DescribedLaunch(
        KERNELS[kernel], (programs,), matrices, M, N, K,
        **config, TRANSPOSED_A=transposed[0], TRANSPOSED_B=transposed[1], ACTIVATION=activation,
        num_warps=WARPS[kernel],
    )  # fmt: skip


GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def matmul(
    a: Tensor,
    b: Tensor,
    kernel: str,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Return activation(a b + bias) + residual, on a Hopper.

    a and b are 16-bit floats that satisfy `rows_are_aligned`, and the residual [M, N] is contiguous.
    """
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    transposed = a.stride(1) != 1, b.stride(1) != 1
    steps = max(a.stride()), max(b.stride())
    where = a.dtype, a.get_device()
    launch = _plan(kernel, (M, N, K), steps, transposed, *where, activation, bias is not None, residual is not None)
    launch(a, b, c, bias, residual)
    return c
