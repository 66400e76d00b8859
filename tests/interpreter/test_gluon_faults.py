"""Faulty Gluon kernels: each is reported at the line that ends in the comment "fault"."""

import inspect
import re

import pytest
import torch
from triton import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from interpreter.gluon_kernels import NEEDS, ROW, TILE, descriptor, integers
from tilewright.errors import KernelAborted, KernelFault
from tilewright.interpreter import interpret
from tilewright.interpreter.results import OUT_OF_BOUNDS, RACE, READ_BEFORE_WRITE

pytestmark = NEEDS

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def faulty_lines(*kernels):
    lines = set()
    for kernel in kernels:
        text, first = inspect.getsourcelines(kernel.fn)
        lines |= {number for number, line in enumerate(text, first) if line.rstrip().endswith("# fault")}
    assert lines
    return lines


def findings(kernel, *args, **options):
    with interpret(faults="collect") as run:
        kernel[(1,)](*args, num_warps=4, **options)
    return run.findings


def aborted(kernel, *args, **options):
    with pytest.raises(KernelAborted) as error, interpret():
        kernel[(1,)](*args, num_warps=4, **options)
    assert "\n" not in str(error.value)
    return error.value


@gluon.jit
def past_the_end(x_ptr, BLOCK: gl.constexpr):
    offs = gl.arange(0, BLOCK, layout=ROW)
    gl.store(x_ptr + offs, offs * 0.5)  # fault


def test_a_pointer_out_of_bounds():
    (found,) = findings(past_the_end, torch.zeros(100), BLOCK=128)
    assert (found.kind, found.argument, found.lanes, found.element) == (OUT_OF_BOUNDS, "x_ptr", 28, (100,))
    assert {found.line} == faulty_lines(past_the_end)
    with pytest.raises(KernelFault, match="past_the_end"), interpret():
        past_the_end[(1,)](torch.zeros(100), BLOCK=128, num_warps=4)


@gluon.jit
def third_of_two(x_ptr, i):
    buffers = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT)
    buffers.index(i - 5)  # an index alone is no access
    buffers.index(i).store(gl.load(x_ptr + gl.arange(0, 128, layout=ROW)))  # fault


def test_a_buffer_out_of_bounds():
    (found,) = findings(third_of_two, torch.zeros(128), 2)
    assert (found.kind, found.argument, found.line) == (OUT_OF_BOUNDS, "buffers", *faulty_lines(third_of_two))
    assert "index 2 of `buffers`, whose first dimension has 2 elements" in str(found)


@gluon.jit
def half_written(x_ptr):
    buffer = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    half: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buffer.slice(0, 64).store(gl.load(x_ptr + gl.arange(0, 64, layout=half)))
    gl.store(x_ptr + gl.arange(0, 128, layout=ROW), buffer.load(ROW))  # fault


def test_shared_memory_that_nothing_has_written():
    (found,) = findings(half_written, torch.zeros(128))
    assert (found.kind, found.element, found.lanes) == (READ_BEFORE_WRITE, (64,), 64)
    assert {found.line} == faulty_lines(half_written)


@gluon.jit
def garbage(x_ptr, y_ptr):
    buffer = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    buffer.store(gl.load(x_ptr + gl.arange(0, 128, layout=ROW)))  # fault
    gl.store(y_ptr + gl.arange(0, 128, layout=ROW), buffer.load(ROW) + 1.0)


def test_unwritten_global_memory_is_followed_through_shared_memory():
    with interpret(faults="collect") as run:
        garbage[(1,)](torch.empty(128), torch.zeros(128), num_warps=4)
    (found,) = run.findings
    assert (found.kind, found.argument) == (READ_BEFORE_WRITE, "x_ptr")
    assert {found.line} == faulty_lines(garbage)
    assert "reaches the store in line" in str(found)


@gluon.jit
def no_wait_for_cp_async(x_ptr, y_ptr):
    buffer = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    async_copy.async_copy_global_to_shared(buffer, x_ptr + gl.arange(0, 128, layout=ROW))
    async_copy.commit_group()
    async_copy.wait_group(1)
    gl.store(y_ptr + gl.arange(0, 128, layout=ROW), buffer.load(ROW))  # fault


def test_cp_async_in_flight():
    (found,) = findings(no_wait_for_cp_async, torch.zeros(128), torch.zeros(128))
    assert (found.kind, found.line) == (RACE, *faulty_lines(no_wait_for_cp_async))
    assert "async_copy.wait_group" in str(found)


@gluon.jit
def store_tile(y_desc, FENCE: gl.constexpr, WAIT: gl.constexpr, REUSE: gl.constexpr):
    tile = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    tile.store(gl.full(y_desc.block_type.shape, 1.0, y_desc.dtype, TILE))
    if FENCE:
        fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [0, 0], tile)  # fault
    if REUSE:
        tile.store(gl.full(y_desc.block_type.shape, 2.0, y_desc.dtype, TILE))  # fault
    if WAIT:
        tma.store_wait(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((False, True, False), "without fence_async_shared in between"),
        ((True, False, False), "in flight when the program ends, without tma.store_wait"),
        ((True, True, True), "store of `tile[0, 0]` races with the TMA store"),
    ],
)
def test_tma_stores(options, message):
    (found,) = findings(store_tile, descriptor(torch.zeros(32, 64), [32, 64]), *options)
    assert (found.kind, found.argument) == (RACE, "tile")
    assert found.line in faulty_lines(store_tile)
    assert message in str(found)


@gluon.jit
def load_tile(x_desc, y_ptr, BYTES: gl.constexpr, PHASE: gl.constexpr, WAIT: gl.constexpr):
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    if BYTES:
        mbarrier.expect(bar, BYTES)
    tma.async_copy_global_to_shared(x_desc, [0, 0], bar, tile)
    if WAIT:
        mbarrier.wait(bar, PHASE)  # fault
    offs_m = gl.arange(0, 32, gl.SliceLayout(1, TILE))
    offs_n = gl.arange(0, 64, gl.SliceLayout(0, TILE))
    gl.store(y_ptr + offs_m[:, None] * 64 + offs_n[None, :], tile.load(TILE))  # fault


def load_tile_with(*options):
    return descriptor(torch.zeros(32, 64), [32, 64]), torch.zeros(32, 64), *options


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (0, "0 phases completed, 1 of 1 arrivals missing, 8192 bytes copied that no `expect` announced"),
        (8200, "0 phases completed, 8 bytes missing"),
    ],
)
def test_wrong_expect_is_a_deadlock(nbytes, message):
    error = aborted(load_tile, *load_tile_with(nbytes, 0, True))
    assert error.kind == "timeout"
    line = min(faulty_lines(load_tile))
    assert re.match(rf"\S*test_gluon_faults.py:{line}: deadlock in program \(0, 0, 0\): `load_tile` waits", str(error))
    assert f"for phase 0 of `bar` ({message})" in str(error)


def test_a_wait_for_the_wrong_phase_is_a_deadlock():
    error = aborted(load_tile, *load_tile_with(8192, 1, True))
    assert "waits in line" in str(error)
    assert "for phase 1 of `bar` (1 phases completed, 1 of 1 arrivals missing)" in str(error)


def test_data_used_before_tma_delivers_it():
    found = findings(load_tile, *load_tile_with(8192, 0, False))
    assert {f.kind for f in found} == {RACE}
    assert found[0].line == max(faulty_lines(load_tile))
    assert "load of `tile[0, 0]` races with the TMA load in line" in str(found[0])
    assert "in flight when the program ends, without mbarrier.wait on `bar`" in str(found[1])


@gluon.jit
def early_reuse(a_desc, b_desc, c_ptr, OUTSTANDING: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, [0, 0], bar, a)
    tma.async_copy_global_to_shared(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = warpgroup_mma_init(gl.zeros((64, 64), gl.float32, layout))
    acc = warpgroup_mma(a, b, acc, is_async=True)
    acc = warpgroup_mma_wait(OUTSTANDING, deps=(acc,))
    mbarrier.expect(bar, a_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, [0, 0], bar, a)  # fault
    mbarrier.wait(bar, 1)
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    offs_n = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(c_ptr + offs_m[:, None] * 64 + offs_n[None, :], acc)  # fault


def test_an_operand_and_an_accumulator_of_wgmma_in_flight():
    a, b, c = integers(64, 32), integers(32, 64), torch.zeros(64, 64)
    operands = descriptor(a, [64, 32]), descriptor(b, [32, 64]), c
    assert not findings(early_reuse, *operands, 0)
    assert torch.equal(c, a.float() @ b.float())
    found = findings(early_reuse, *operands, 1)
    assert {f.line for f in found if f.kind == RACE} >= faulty_lines(early_reuse)
    assert [f.argument for f in found][:2] == ["a", "accumulator"]
    assert all("warpgroup_mma_wait" in str(f) for f in found)


@gluon.jit
def fill(tile, full, empty, y_ptr, ROUNDS: gl.constexpr, ARRIVE: gl.constexpr):
    for i in gl.static_range(ROUNDS):
        mbarrier.wait(empty, (i & 1) ^ 1)  # fault
        tile.store(gl.full([128], 1.0 + i, gl.float32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(full, count=1)


@gluon.jit
def drain(tile, full, empty, y_ptr, ROUNDS: gl.constexpr, ARRIVE: gl.constexpr):
    for i in gl.static_range(ROUNDS):
        mbarrier.wait(full, i & 1)  # fault
        gl.store(y_ptr + i * 128 + gl.arange(0, 128, layout=ROW), tile.load(ROW))
        if ARRIVE:
            mbarrier.arrive(empty, count=1)


@gluon.jit
def hand_over(y_ptr, ROUNDS: gl.constexpr, ARRIVE: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (drain, (tile, full, empty, y_ptr, ROUNDS, ARRIVE)),
            (fill, (tile, full, empty, y_ptr, ROUNDS, ARRIVE)),
        ],
        [1],
        [24],
    )


def test_a_missing_arrive_is_a_deadlock_of_both_partitions():
    y = torch.zeros(3, 128)
    assert not findings(hand_over, y, 3, True)
    assert torch.equal(y[:, 0], torch.tensor([1.0, 2.0, 3.0]))
    error = aborted(hand_over, y, 3, False)
    assert error.kind == "timeout"
    wait_in_fill, wait_in_drain = sorted(faulty_lines(fill, drain))
    assert f":{wait_in_drain}: deadlock in program (0, 0, 0)" in str(error)
    missing = "1 phases completed, 1 of 1 arrivals missing"
    assert f"`drain` waits in line {wait_in_drain} for phase 1 of `full` ({missing})" in str(error)
    missing = "0 phases completed, 1 of 1 arrivals missing"
    assert f"`fill` waits in line {wait_in_fill} for phase 0 of `empty` ({missing})" in str(error)


def test_a_partition_that_has_returned_is_named():
    @gluon.jit
    def leave():
        pass

    @gluon.jit
    def hand_over_nothing(y_ptr):
        tile = gl.allocate_shared_memory(gl.float32, [128], FLAT)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        gl.warp_specialize([(drain, (tile, bar, bar, y_ptr, 1, True)), (leave, ())], [1], [24])

    assert "`leave` has returned" in str(aborted(hand_over_nothing, torch.zeros(128)))


@gluon.jit
def write_tile(tile):
    tile.store(gl.full([128], 1.0, gl.float32, gl.BlockedLayout([1], [32], [1], [0])))  # fault


@gluon.jit
def read_tile(tile):
    tile.load(gl.BlockedLayout([1], [32], [4], [0]))  # fault


@gluon.jit
def unordered(y_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    tile.store(gl.zeros([128], gl.float32, ROW))
    gl.warp_specialize([(read_tile, (tile,)), (write_tile, (tile,))], [1], [24])
    gl.store(y_ptr + gl.arange(0, 128, layout=ROW), tile.load(ROW))  # both have returned


def test_partitions_race_without_a_barrier():
    (found,) = findings(unordered, torch.zeros(128))
    assert (found.kind, found.argument, found.lanes) == (RACE, "tile", 128)
    assert found.line in faulty_lines(write_tile, read_tile)
    assert "of `read_tile`" in str(found) or "of `write_tile`" in str(found)
    assert "an mbarrier has to order the partitions" in str(found)


@gluon.jit
def no_init(ARRIVALS: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if ARRIVALS:
        mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=ARRIVALS + 1)  # fault


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (0, "`bar` is used as an mbarrier before mbarrier.init"),
        (1, "2 more arrivals at `bar`, which expects 1 in this phase"),
    ],
)
def test_misused_barriers(arrivals, message):
    error = aborted(no_init, arrivals)
    assert f":{faulty_lines(no_init).pop()}: no_init fails: {message}" in str(error)


@gluon.jit
def two_layouts(x_ptr):
    other: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    x = gl.load(x_ptr + gl.arange(0, 128, layout=ROW))
    gl.store(x_ptr + gl.arange(0, 128, layout=other), x)  # fault


@gluon.jit
def wrong_operand(x_desc):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], flat)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    tma.async_copy_global_to_shared(x_desc, [0, 0], bar, a)  # fault


@gluon.jit
def too_much(x_ptr):
    buffers = gl.allocate_shared_memory(gl.float32, [512, 128], FLAT)
    x = gl.load(x_ptr + gl.arange(0, 128, layout=ROW))
    buffers.index(0).store(x)


def test_shared_memory_is_limited():
    message = "too_much needs 262144 bytes of shared memory per program, and an h200 has 232448"
    assert message in str(aborted(too_much, torch.zeros(128)))


def test_what_the_compiler_rejects_is_rejected_with_its_message():
    with pytest.raises(CompilationError, match="Layout mismatch") as error, interpret():
        two_layouts[(1,)](torch.zeros(128), num_warps=4)
    assert f"test_gluon_faults.py:{faulty_lines(two_layouts).pop()}: two_layouts fails" in str(error.value)
    error = aborted(wrong_operand, descriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64]))
    assert f"test_gluon_faults.py:{faulty_lines(wrong_operand).pop()}: wrong_operand fails" in str(error)


@gluon.jit
def lost_assignment(x_ptr, n):
    slot = n
    previous = slot
    for _ in range(4):
        gl.store(x_ptr + slot, previous)
        previous = slot  # fault
        slot = slot + 1


@gluon.jit
def kept_assignment(x_ptr, n):
    slot = n
    previous = n - 1
    for _ in range(4):
        gl.store(x_ptr + slot, previous)
        previous = slot
        slot = slot + 1


def test_an_assignment_that_triton_loses_is_refused():
    x = torch.zeros(8, dtype=torch.int32)
    error = aborted(lost_assignment, x, 2)
    assert f":{faulty_lines(lost_assignment).pop()}: lost_assignment fails" in str(error)
    assert "loses this assignment to `previous` in the next iteration" in str(error)
    assert not findings(kept_assignment, x, 2)
    assert x.tolist() == [0, 0, 1, 2, 3, 4, 0, 0]


@gluon.jit
def tensor_memory():
    layout: gl.constexpr = blackwell.TensorMemoryLayout([64, 64], col_stride=1)
    blackwell.allocate_tensor_memory(gl.float32, [64, 64], layout)  # fault


def test_blackwell_is_refused_by_name_and_line():
    error = aborted(tensor_memory)
    assert error.kind == "unsupported"
    assert f":{faulty_lines(tensor_memory).pop()}: tensor_memory uses" in str(error)
    assert "allocate_tensor_memory" in str(error)
