"""Small correct Triton kernels, each with a feature that a memory checker could mistake for a fault."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.tools.tensor_descriptor import TensorDescriptor

from interpreter.faulty import randn, untouched_zeros

Tensors = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Tricky:
    name: str
    run: Callable[[], Tensors]
    reference: Callable[[], Tensors]
    exact: bool


TRICKY: list[Tricky] = []


def equals(reference: Callable[[], Tensors], *, exact: bool = True):
    """Register a launch function in TRICKY with its reference, to compare exactly or within the usual tolerance."""

    def register(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        TRICKY.append(Tricky(run.__name__, run, reference, exact))
        return run

    return register


# ---------------------------------------------------------------------------------------------------------------------
# Views
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def double_2d(x, out, stride_xr, stride_xc, stride_or, stride_oc, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Double a matrix with any strides, one tile per program."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    mask = (row < rows) & (column < columns)
    value = tl.load(x + row * stride_xr + column * stride_xc, mask=mask)
    tl.store(out + row * stride_or + column * stride_oc, 2 * value, mask=mask)


def doubled(x: Tensor, out: Tensor) -> Tensor:
    rows, columns = x.shape
    grid = (triton.cdiv(rows, 4), triton.cdiv(columns, 32))
    double_2d[grid](x, out, *x.stride(), *out.stride(), rows, columns, R=4, C=32)
    return out


@equals(lambda: 2 * randn(6, 128)[:, :100])
def padded_views():
    """Rows of 100 elements padded to 128; the padding is neither read nor written."""
    return doubled(randn(6, 128)[:, :100], torch.empty(6, 128)[:, :100])


@equals(lambda: 2 * randn(6, 100)[:, 1::3])
def every_third_column():
    return doubled(randn(6, 100)[:, 1::3], torch.empty(6, 3 * 33)[:, ::3])


@equals(lambda: 2 * randn(50, 6).t())
def transposed():
    return doubled(randn(50, 6).t(), torch.empty(6, 50))


@equals(lambda: 2 * randn(50).expand(6, 50))
def expanded_rows():
    """All rows of the input share memory."""
    return doubled(randn(50).expand(6, 50), torch.empty(6, 50))


@equals(lambda: 2 * randn(1).expand(6, 50))
def expanded_scalar():
    return doubled(randn(1).expand(6, 50), torch.empty(6, 50))


@equals(lambda: 2 * randn(201)[1:].view(4, 50))
def misaligned():
    """The first element is the second of its storage."""
    return doubled(randn(201)[1:].view(4, 50), torch.empty(201)[1:].view(4, 50))


@equals(lambda: 2 * randn(12).as_strided((10, 3), (1, 1)))
def sliding_windows():
    """A view whose elements overlap in memory, as an input."""
    return doubled(randn(12).as_strided((10, 3), (1, 1)), torch.empty(10, 3))


@equals(lambda: 2 * randn(12, 40))
def halves_of_one_storage_by_two_launches():
    x, out = randn(12, 40), torch.empty(12, 40)
    doubled(x[:6], out[:6])
    doubled(x[6:], out[6:])
    return out


@equals(lambda: 4 * randn(6, 50))
def second_launch_reads_the_first():
    """The tensor in between comes from torch.empty."""
    return doubled(doubled(randn(6, 50), torch.empty(6, 50)), torch.empty(6, 50))


@equals(lambda: 2 * randn(6, 50))
def input_and_output_are_one_tensor():
    x = randn(6, 50)
    return doubled(x, x)


@equals(lambda: torch.cat([2 * randn(6, 50), torch.ones(2, 50)]))
def torch_writes_the_rest():
    """The kernel writes six rows, torch the other two."""
    out = torch.empty(8, 50)
    doubled(randn(6, 50), out[:6])
    out[6:] = 1
    return out


@equals(lambda: (2 * randn(6, 50), 2 * (randn(6, 50) + 1), torch.zeros(6, 50)))
def torch_fills_what_was_empty():
    copied, summed, zeroed = torch.empty(6, 50), torch.empty(6, 50), torch.empty(6, 50)
    copied.copy_(randn(6, 50))
    torch.add(randn(6, 50), 1, out=summed)
    zeroed.zero_()
    return tuple(doubled(x, torch.empty_like(x)) for x in (copied, summed, zeroed))


# ---------------------------------------------------------------------------------------------------------------------
# Pointers and offsets
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def abs_in_place(x, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offs, tl.abs(tl.load(x + offs, mask=offs < n)), mask=offs < n)


@equals(lambda: randn(100).abs())
def in_place():
    x = randn(100)
    abs_in_place[(2,)](x, 100, BLOCK=64)
    return x


@triton.jit
def reverse(x, out, n, BLOCK: tl.constexpr):
    """Move the pointer far out of bounds and back before it is used."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    beyond = x + n + 1000
    value = tl.load(beyond - 1001 - offs, mask=offs < n)
    tl.store(out + offs, value, mask=offs < n)


@equals(lambda: randn(100).flip(0))
def pointer_comes_back_into_range():
    out = torch.empty(100)
    reverse[(2,)](randn(100), out, 100, BLOCK=64)
    return out


@triton.jit
def copy_first_lane(x, out, far, BLOCK: tl.constexpr):
    """Mask all lanes but one; the offsets of the others are gigabytes out of bounds or wrap around."""
    lane = tl.arange(0, BLOCK)
    value = tl.load(x + lane * far, mask=lane == 0)
    tl.store(out - lane * far, value, mask=lane == 0)


@equals(lambda: randn(1))
def masked_lanes_far_out_of_bounds():
    out = torch.empty(1)
    copy_first_lane[(1,)](randn(1), out, 2**27 + 1, BLOCK=32)
    return out


@triton.jit
def mark_row_in_64_bits(out, first, stride, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    tl.store(out + row.to(tl.int64) * stride + tl.arange(0, BLOCK), tl.program_id(0) + 1)


@equals(lambda: torch.tensor([[1], [2]], dtype=torch.int8).expand(2, 16))
def offsets_beyond_32_bits_in_64():
    out = torch.empty(2**15 + 1, 2**16, dtype=torch.int8)
    mark_row_in_64_bits[(2,)](out, 2**15 - 1, out.stride(0), BLOCK=16)
    return out[2**15 - 1 :, :16]


@triton.jit
def read_far(x, out, start, BLOCK: tl.constexpr):
    """Move the pointer twice by less than 2**31, so that neither step wraps around."""
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, tl.load(x + start + offs + start))


@equals(lambda: torch.zeros(16, dtype=torch.int8))
def pointer_moves_in_two_steps():
    out = torch.empty(16, dtype=torch.int8)
    read_far[(1,)](untouched_zeros(2**31 + 64), out, 2**30 + 8, BLOCK=16)
    return out


@triton.jit
def look_up_by_hash(table, out, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiplicative hash: the product wraps around on purpose, its upper bits index the table."""
    key = tl.arange(0, BLOCK)
    slot = (key.to(tl.uint32) * 2654435769) >> (32 - BITS)
    tl.store(out + key, tl.load(table + slot))


@equals(lambda: randn(16)[(torch.arange(64) * 2654435769 % 2**32) >> 28])
def hash_that_wraps():
    out = torch.empty(64)
    look_up_by_hash[(1,)](randn(16), out, BITS=4, BLOCK=64)
    return out


@triton.jit
def look_up_by_signed_hash(table, out, slots, BLOCK: tl.constexpr):
    """The same hash in int32: the product wraps around, loses its sign and is reduced to an index."""
    key = tl.arange(0, BLOCK)
    slot = ((key * 1103515245 + 12345) & 0x7FFFFFFF) % slots
    tl.store(out + key, tl.load(table + slot))


@equals(lambda: randn(10)[((torch.arange(64) * 1103515245 + 12345) & 0x7FFFFFFF) % 10])
def signed_hash_that_wraps():
    out = torch.empty(64)
    look_up_by_signed_hash[(1,)](randn(10), out, 10, BLOCK=64)
    return out


@triton.jit
def copy_from_one_of_two(a, b, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    if pid % 2 == 0:  # noqa: SIM108  a branch, not a select
        source = a
    else:
        source = b + BLOCK
    tl.store(out + pid * BLOCK + offs, tl.load(source + offs))


@equals(lambda: torch.cat([randn(16), randn(32, seed=1)[16:]] * 2))
def pointer_picked_by_if():
    out = torch.empty(64)
    copy_from_one_of_two[(4,)](randn(16), randn(32, seed=1), out, BLOCK=16)
    return out


@triton.jit
def join_lanes(a, b, out, n, BLOCK: tl.constexpr):
    """Concatenate a and b; lanes of one load access different tensors."""
    offs = tl.arange(0, BLOCK)
    ptrs = tl.where(offs < n, a + offs, b + (offs - n))
    tl.store(out + offs, tl.load(ptrs))


@equals(lambda: torch.cat([randn(10), randn(22, seed=1)]))
def pointer_picked_by_lane():
    out = torch.empty(32)
    join_lanes[(1,)](randn(10), randn(22, seed=1), out, 10, BLOCK=32)
    return out


@triton.jit
def sum_of_all(tensors, out, n, BLOCK: tl.constexpr):
    """Sum a tuple of tensors."""
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(tensors)):
        acc += tl.load(tensors[i] + offs, mask=offs < n)
    tl.store(out + offs, acc, mask=offs < n)


@equals(lambda: randn(50) + randn(50, seed=1) + randn(50, seed=2))
def tuple_of_tensors():
    out = torch.empty(50)
    sum_of_all[(1,)]((randn(50), randn(50, seed=1), randn(50, seed=2)), out, 50, BLOCK=64)
    return out


@triton.jit
def unpack_words(x, out, BLOCK: tl.constexpr):
    """Read four bytes as one word."""
    offs = tl.arange(0, BLOCK)
    word = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + offs)
    for byte in tl.static_range(4):
        tl.store(out + 4 * offs + byte, (word >> 8 * byte).to(tl.int8))


@equals(lambda: torch.arange(64, dtype=torch.int8))
def bytes_read_as_words():
    out = torch.empty(64, dtype=torch.int8)
    unpack_words[(1,)](torch.arange(64, dtype=torch.int8), out, BLOCK=16)
    return out


@triton.jit
def add_scalars(a, b, out):
    tl.store(out, tl.load(a) + tl.load(b))


@equals(lambda: randn() + randn(1).squeeze())
def zero_dimensional_tensors():
    out = torch.empty(())
    add_scalars[(1,)](randn(), randn(1), out)
    return out


@triton.jit
def scale_and_shift(x, bias, out, n, scale=2.0, BLOCK: tl.constexpr = 64):
    """One argument is None and two have defaults."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, mask=offs < n) * scale
    if bias is not None:
        value += tl.load(bias + offs, mask=offs < n)
    tl.store(out + offs, value, mask=offs < n)


@equals(lambda: (2 * randn(100), 2 * randn(100) + randn(100, seed=1)))
def defaults_and_none():
    x, plain, shifted = randn(100), torch.empty(100), torch.empty(100)
    scale_and_shift[(2,)](x, None, plain, 100)
    scale_and_shift[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x=x, bias=randn(100, seed=1), out=shifted, n=100)
    return plain, shifted


# ---------------------------------------------------------------------------------------------------------------------
# Descriptors and block pointers
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def double_described(x, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Boundary tiles: out-of-bounds elements load as zero and are not stored."""
    source = tl.make_tensor_descriptor(x, [rows, columns], [stride, 1], [ROWS, COLUMNS])
    target = tl.make_tensor_descriptor(out, [rows, columns], [stride, 1], [ROWS, COLUMNS])
    start = [tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS]
    target.store(start, 2 * source.load(start))


@equals(lambda: 2 * randn(20, 48)[:, :40])
def descriptors_at_the_edges():
    x, out = randn(20, 48)[:, :40], torch.empty(20, 48)[:, :40]
    double_described[(2, 3)](x, out, 20, 40, 48, ROWS=16, COLUMNS=16)
    return out


@triton.jit
def sum_rows_host_described(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    start = tl.program_id(0) * ROWS
    acc = tl.zeros([ROWS], tl.float32)
    for column in range(0, columns, COLUMNS):
        acc += tl.sum(x.load([start, column]), axis=1)
    row = start + tl.arange(0, ROWS)
    tl.store(out + row, acc, mask=row < rows)


@equals(lambda: randn(20, 40).sum(1), exact=False)
def host_descriptor_over_the_edges():
    x, out = randn(20, 40), torch.empty(20)
    sum_rows_host_described[(2,)](TensorDescriptor.from_tensor(x, [16, 16]), out, 20, 40, ROWS=16, COLUMNS=16)
    return out


@triton.jit
def shift_described(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile that starts above and left of the tensor."""
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    value = source.load([-2, -4])
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(out + row * COLUMNS + column, value)


@equals(lambda: torch.nn.functional.pad(randn(8, 16)[:6, :12], (4, 0, 2, 0)))
def descriptor_before_the_start():
    out = torch.empty(8, 16)
    shift_described[(1,)](randn(8, 16), out, 8, 16, ROWS=8, COLUMNS=16)
    return out


if hasattr(TritonSemantic, "make_block_ptr"):  # not in every version of Triton

    @triton.jit
    def double_blocks(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        start = tl.program_id(0) * ROWS
        source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (start, 0), (ROWS, COLUMNS), (1, 0))
        target = tl.make_block_ptr(out, (rows, columns), (columns, 1), (start, 0), (ROWS, COLUMNS), (1, 0))
        for _ in range(0, columns, COLUMNS):
            value = tl.load(source, boundary_check=(0, 1), padding_option="zero")
            tl.store(target, 2 * value, boundary_check=(0, 1))
            source = tl.advance(source, (0, COLUMNS))
            target = tl.advance(target, (0, COLUMNS))

    @equals(lambda: 2 * randn(20, 40))
    def block_pointers_at_the_edges():
        x, out = randn(20, 40), torch.empty(20, 40)
        double_blocks[(2,)](x, out, 20, 40, ROWS=16, COLUMNS=16)
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Several programs at one element
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def all_store_the_length(out, n):
    tl.store(out, n)


@equals(lambda: torch.tensor([7]))
def equal_writes():
    out = torch.empty(1, dtype=torch.int64)
    all_store_the_length[(5,)](out, 7)
    return out


@triton.jit
def copy_overlapping(x, out, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Overlapping blocks write the same values."""
    offs = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out + offs, tl.load(x + offs, mask=offs < n), mask=offs < n)


@equals(lambda: randn(100))
def overlapping_blocks():
    out = torch.empty(100)
    copy_overlapping[(4,)](randn(100), out, 100, STEP=28, BLOCK=32)
    return out


@triton.jit
def relu_overlapping_in_place(x, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Neighbouring programs read and write the same elements, but all are positive, so no store changes a value."""
    offs = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    value = tl.load(x + offs, mask=offs < n)
    tl.store(x + offs, tl.maximum(value, 0.0), mask=offs < n)


@equals(lambda: randn(100).abs())
def rewrites_what_is_there():
    x = randn(100).abs()
    relu_overlapping_in_place[(4,)](x, 100, STEP=28, BLOCK=32)
    return x


@triton.jit
def lanes_agree(x, out, BLOCK: tl.constexpr):
    """Four lanes of one store write the same value to one element."""
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs // 4, tl.load(x + offs // 4))


@equals(lambda: randn(8))
def equal_lanes():
    out = torch.empty(8)
    lanes_agree[(1,)](randn(8), out, BLOCK=32)
    return out


@triton.jit
def store_twice(x, out, BLOCK: tl.constexpr):
    """A program overwrites its own store."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offs, -1.0)
    tl.store(out + offs, tl.load(x + offs))


@equals(lambda: randn(64))
def last_store_wins():
    out = torch.empty(64)
    store_twice[(2,)](randn(64), out, BLOCK=32)
    return out


@triton.jit
def keep_in_memory(x, scratch, out, steps, BLOCK: tl.constexpr):
    """Each program reads back its own stores to uninitialized scratch memory."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(scratch + offs, tl.load(x + offs))
    for _ in range(steps):
        tl.store(scratch + offs, 2 * tl.load(scratch + offs))
    tl.store(out + offs, tl.load(scratch + offs))


@equals(lambda: 8 * randn(64))
def own_scratch():
    scratch, out = torch.empty(64), torch.empty(64)
    keep_in_memory[(2,)](randn(64), scratch, out, 3, BLOCK=32)
    return out


@triton.jit
def apply_triangle(x, a, out, BLOCK: tl.constexpr):
    """Only the lower triangle of `a` is written; the product reads all of it and keeps the triangle."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    offs = row * BLOCK + column
    tl.store(a + offs, tl.load(x + offs), mask=column <= row)
    tile = tl.load(a + offs)
    tile = tl.where(column <= row, tl.exp(tile) * 0.5, 0.0)
    scale = tl.where((tl.load(a + offs) > 0) & (column <= row), 1.0, 2.0)
    product = tl.dot(tile * scale, tl.load(x + offs), input_precision="ieee")
    tl.store(out + offs, product)


def triangle_product() -> Tensor:
    x = randn(16, 16)
    return (x.exp() * 0.5 * torch.where(x > 0, 1.0, 2.0)).tril() @ x


@equals(triangle_product, exact=False)
def unwritten_lanes_are_discarded():
    out = torch.empty(16, 16)
    apply_triangle[(1,)](randn(16, 16), torch.empty(16, 16), out, BLOCK=16)
    return out


@triton.jit
def multiply_split_k(a, b, out, m, n, k, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Split-K matrix product with atomics."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, k, SPLITS * BLOCK):
        x = tl.load(a + row * k + (start + column), mask=(row < m) & (start + column < k), other=0.0)
        y = tl.load(b + (start + row) * n + column, mask=(start + row < k) & (column < n), other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.atomic_add(out + row * n + column, acc, mask=(row < m) & (column < n))


@equals(lambda: randn(10, 90) @ randn(90, 12, seed=1), exact=False)
def split_k_by_atomics():
    out = torch.zeros(10, 12)
    multiply_split_k[(3,)](randn(10, 90), randn(90, 12, seed=1), out, 10, 12, 90, SPLITS=3, BLOCK=16)
    return out


@triton.jit
def reverse_after_waiting(x, out, BLOCK: tl.constexpr, REDUCES: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + offs)
    tl.store(out + offs, value)
    tl.store(out + offs, tl.load(out + offs) + 1)  # each thread loads what it stored
    if REDUCES:
        value -= tl.sum(value)  # passes data between warps, so they wait for each other
    else:
        tl.debug_barrier()
    value = tl.load(out + BLOCK - 1 - offs)
    tl.debug_barrier()
    tl.store(out + offs, value)


def reversed_in_place(count: int, **options) -> Tensor:
    out = torch.empty(count)
    reverse_after_waiting[(1,)](randn(count), out, BLOCK=count, **options)
    return out


@equals(lambda: randn(256).flip(0) + 1)
def warps_that_wait_at_a_barrier():
    return reversed_in_place(256, REDUCES=False)


@equals(lambda: randn(256).flip(0) + 1)
def warps_that_wait_in_a_reduction():
    return reversed_in_place(256, REDUCES=True)


@equals(lambda: randn(256).flip(0) + 1)
def a_single_warp():
    return reversed_in_place(256, REDUCES=False, num_warps=1)


@triton.jit
def sum_last_arriver(x, parts, arrived, out, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """The last program to arrive sums the partial sums; the counter's acquire-release orders stores before loads."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + pid, tl.sum(tl.load(x + offs, mask=offs < n, other=0.0)))
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == PROGRAMS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, PROGRAMS))))
        tl.atomic_xchg(arrived, 0)  # ready for the next launch


@equals(lambda: (randn(100).sum().view(1), torch.zeros(1, dtype=torch.int32)), exact=False)
def last_arriver_adds_up():
    parts, arrived, out = torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1)
    for _ in range(2):
        sum_last_arriver[(4,)](randn(100), parts, arrived, out, 100, BLOCK=32, PROGRAMS=4)
    return out, arrived


@triton.jit
def add_under_a_lock(x, lock, out, BLOCK: tl.constexpr):
    """Read-modify-write under a spin lock."""
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * BLOCK + offs)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    tl.store(out + offs, tl.load(out + offs) + value)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@equals(lambda: randn(4, 32).sum(0), exact=False)
def spin_lock():
    lock, out = torch.zeros(1, dtype=torch.int32), torch.zeros(32)
    add_under_a_lock[(4,)](randn(4, 32), lock, out, BLOCK=32)
    return out


@triton.jit
def first_sets_then_others_add(x, lock, count, out, BLOCK: tl.constexpr):
    """The lock of Triton's layer-norm backward: the first holder stores, so the output may be uninitialized."""
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * BLOCK + offs)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    held_before = tl.load(count)
    tl.debug_barrier()  # wait until all warps have read it
    if held_before == 0:
        tl.atomic_xchg(count, 1)
    else:
        value += tl.load(out + offs)
    tl.store(out + offs, value)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@equals(lambda: randn(4, 32).sum(0), exact=False)
def lock_with_a_first_time():
    lock, count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.empty(32)
    first_sets_then_others_add[(4,)](randn(4, 32), lock, count, out, BLOCK=32)
    return out


@triton.jit
def cumsum_chained(x, sums, ready, out, BLOCK: tl.constexpr):
    """Each program waits for the sum of the previous program."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs)
    before = 0.0
    if pid > 0:
        while tl.atomic_add(ready + pid - 1, 0, sem="acquire") == 0:
            pass
        before = tl.load(sums + pid - 1)
    tl.store(sums + pid, before + tl.sum(value))
    tl.debug_barrier()
    tl.atomic_xchg(ready + pid, 1, sem="release")
    tl.store(out + offs, before + tl.cumsum(value))


@equals(lambda: randn(128).cumsum(0), exact=False)
def waits_for_the_program_before():
    sums, ready, out = torch.empty(4), torch.zeros(4, dtype=torch.int32), torch.empty(128)
    cumsum_chained[(4,)](randn(128), sums, ready, out, BLOCK=32)
    return out


@triton.jit
def relay(x, data, flags, out, BLOCK: tl.constexpr):
    """Program 0 stores and signals 1, which signals 2, which loads: happens-before is transitive."""
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data + offs, tl.load(x + offs))
    else:
        while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    tl.atomic_xchg(flags + pid, 1, sem="release")
    if pid == 2:
        tl.store(out + offs, tl.load(data + offs))


@equals(lambda: randn(32))
def transitive_synchronization():
    data, flags, out = torch.empty(32), torch.zeros(3, dtype=torch.int32), torch.empty(32)
    relay[(3,)](randn(32), data, flags, out, BLOCK=32)
    return out


@triton.jit
def suffix_sums(x, sums, ready, BLOCK: tl.constexpr):
    """Each program waits for the next program, so that running them in order would deadlock."""
    pid = tl.program_id(0)
    total = tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK)))
    if pid < tl.num_programs(0) - 1:
        while tl.atomic_add(ready + pid + 1, 0, sem="acquire") == 0:
            pass
        total += tl.load(sums + pid + 1)
    tl.store(sums + pid, total)
    tl.debug_barrier()
    tl.atomic_xchg(ready + pid, 1, sem="release")


@equals(lambda: randn(4, 32).sum(1).flip(0).cumsum(0).flip(0), exact=False)
def waits_for_the_program_after():
    sums, ready = torch.empty(4), torch.zeros(4, dtype=torch.int32)
    suffix_sums[(4,)](randn(4, 32), sums, ready, BLOCK=32)
    return sums


@triton.jit
def count_and_bound(x, counts, largest, smallest, n, bins, BLOCK: tl.constexpr):
    """Lanes and programs update the same elements atomically."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    value = tl.load(x + offs, mask=mask, other=0)
    tl.atomic_add(counts + value % bins, 1, mask=mask, sem="relaxed")
    tl.atomic_max(largest, tl.max(value))
    tl.atomic_min(smallest + tl.zeros([BLOCK], tl.int32), value, mask=mask)


def squares() -> Tensor:
    return (torch.arange(100, dtype=torch.int32) - 30) ** 2 + 3


@equals(lambda: (torch.bincount(squares() % 8, minlength=8).int(), squares().max().view(1), squares().min().view(1)))
def atomics_of_all_lanes():
    counts, largest = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    smallest = torch.full((1,), 2**31 - 1, dtype=torch.int32)
    count_and_bound[(2,)](squares(), counts, largest, smallest, 100, 8, BLOCK=64)
    return counts, largest, smallest


@triton.jit
def take_tickets(counter, owner):
    """Each program takes a ticket from a counter and writes at that index; tickets are unique."""
    ticket = tl.atomic_add(counter, 1, sem="relaxed")
    tl.store(owner + ticket, ticket * 10)


@equals(lambda: torch.arange(6, dtype=torch.int32) * 10)
def indices_from_an_atomic_counter():
    counter, owner = torch.zeros(1, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    take_tickets[(6,)](counter, owner)
    return owner


# ---------------------------------------------------------------------------------------------------------------------
# Control flow
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def sum_ragged(x, starts, out, BLOCK: tl.constexpr):
    """Rows of any length, including 0: the trip count is data-dependent."""
    row = tl.program_id(0)
    start = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    acc = tl.zeros([BLOCK], tl.float32)
    for at in range(start, end, BLOCK):
        offs = at + tl.arange(0, BLOCK)
        acc += tl.load(x + offs, mask=offs < end, other=0.0)
    tl.store(out + row, tl.sum(acc))


STARTS = (0, 40, 40, 41, 73, 100)


@equals(lambda: torch.stack([randn(100)[a:b].sum() for a, b in pairwise(STARTS)]), exact=False)
def ragged_rows():
    out = torch.empty(5)
    sum_ragged[(5,)](randn(100), torch.tensor(STARTS), out, BLOCK=16)
    return out


@triton.jit
def early_return(x, out, blocks, BLOCK: tl.constexpr):
    """The grid is larger than the work; programs without work return."""
    pid = tl.program_id(0)
    if pid >= blocks:
        return
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offs, 2 * tl.load(x + offs))


@equals(lambda: 2 * randn(64))
def programs_without_work():
    out = torch.empty(64)
    early_return[(5,)](randn(64), out, 2, BLOCK=32)
    return out


@triton.jit
def collatz(start, steps):
    """A while loop with a different trip count in every program."""
    pid = tl.program_id(0)
    value = tl.load(start + pid)
    count = 0
    while value != 1:
        if value % 2 == 0:  # noqa: SIM108
            value = value // 2
        else:
            value = 3 * value + 1
        count += 1
    tl.store(steps + pid, count)


@equals(lambda: torch.tensor([0, 1, 7, 2, 5, 8, 16, 3], dtype=torch.int32))
def divergent_while_loops():
    steps = torch.empty(8, dtype=torch.int32)
    collatz[(8,)](torch.arange(1, 9, dtype=torch.int32), steps)
    return steps


@triton.jit
def branches_of_branches(x, out, BLOCK: tl.constexpr):
    """Programs diverge, reconverge and diverge again."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs)
    if pid % 2 == 0:
        value += 1.0
        if pid % 4 == 0:
            value *= 2.0
    elif pid == 3:
        value = -value
    value += 4.0
    if tl.sum(value) > 0:
        tl.store(out + offs, value)
    else:
        tl.store(out + offs, tl.zeros_like(value))


def branched() -> Tensor:
    rows = randn(6, 16) * 10
    rows[0::2] += 1
    rows[0::4] *= 2
    rows[3] *= -1
    rows += 4
    return torch.where(rows.sum(1, keepdim=True) > 0, rows, 0).flatten()


@equals(branched)
def programs_diverge_and_reconverge():
    out = torch.empty(96)
    branches_of_branches[(6,)](randn(6, 16) * 10, out, BLOCK=16)
    return out


@triton.jit
def halve_large_in_place(x, changes, limit, BLOCK: tl.constexpr):
    """Memory changes before programs diverge; the interpreter must not apply the changes twice."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs) + 1.0
    tl.debug_barrier()  # wait for warps that hold copies of these lanes
    tl.store(x + offs, value)
    tl.atomic_add(changes, 1, sem="relaxed")
    while tl.max(value) > limit:
        value *= 0.5
        tl.store(x + offs, value)
        tl.atomic_add(changes, 1, sem="relaxed")


def halved() -> tuple[Tensor, Tensor]:
    x, changes = 16 * randn(6, 16) + 1, torch.full((1,), 6, dtype=torch.int32)
    for row in x:
        while row.max() > 10:
            row *= 0.5
            changes += 1
    return x, changes


@equals(halved)
def memory_changes_before_programs_diverge():
    x, changes = 16 * randn(6, 16), torch.zeros(1, dtype=torch.int32)
    halve_large_in_place[(6,)](x, changes, 10.0, BLOCK=16)
    return x, changes


@triton.jit
def triangle(out):
    pid = tl.program_id(0)
    tl.store(out + pid, pid * (pid + 1) // 2)


@equals(lambda: torch.arange(10_000).cumsum(0).int())
def ten_thousand_programs():
    out = torch.empty(10_000, dtype=torch.int32)
    triangle[(10_000,)](out)
    return out


@triton.jit
def negate_persistent(x, out, n, BLOCK: tl.constexpr):
    """A persistent kernel: three programs process seven tiles."""
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + offs, -tl.load(x + offs, mask=offs < n), mask=offs < n)


@equals(lambda: -randn(100))
def persistent_programs():
    out = torch.empty(100)
    negate_persistent[(3,)](randn(100), out, 100, BLOCK=16)
    return out


@triton.jit
def _tile_in_group(tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the tile of this program in grouped (L2-friendly) order."""
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = pid % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def matmul_grouped(a, b, out, m, n, k, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Rows past the end wrap to the first rows; their results are not stored."""
    tile_m, tile_n = _tile_in_group(tl.cdiv(m, BLOCK), tl.cdiv(n, BLOCK), GROUP)
    row = tile_m * BLOCK + tl.arange(0, BLOCK)
    column = tile_n * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    a_ptrs = a + (row % m)[:, None] * k + inner[None, :]
    b_ptrs = b + inner[:, None] * n + (column % n)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for left in tl.range(k, 0, -BLOCK, num_stages=2):
        x = tl.load(a_ptrs, mask=inner[None, :] < left, other=0.0)
        y = tl.load(b_ptrs, mask=inner[:, None] < left, other=0.0)
        acc += tl.dot(x, y)
        a_ptrs += BLOCK
        b_ptrs += BLOCK * n
    mask = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out + row[:, None] * n + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return matrices of small integers, whose products and sums are exact."""
    return (randn(70, 40) * 2).round().to(dtype), (randn(40, 35, seed=1) * 2).round().to(dtype)


def multiplied(dtype: torch.dtype) -> Tensor:
    a, b = factors(dtype)
    out = torch.empty(70, 35)
    matmul_grouped[(5 * 3,)](a, b, out, 70, 35, 40, BLOCK=16, GROUP=2)
    return out


@equals(lambda: factors(torch.float32)[0] @ factors(torch.float32)[1])
def grouped_tiles_in_float16():
    return multiplied(torch.float16)


@equals(lambda: factors(torch.float32)[0] @ factors(torch.float32)[1])
def grouped_tiles_in_bfloat16():
    return multiplied(torch.bfloat16)


@triton.jit
def place_of_program(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out + at, 100 * z + 10 * y + x)


@equals(lambda: torch.tensor([[[100 * z + 10 * y + x for x in range(3)] for y in range(2)] for z in range(4)]))
def three_dimensions_of_programs():
    out = torch.empty(4, 2, 3, dtype=torch.int64)
    place_of_program[(3, 2, 4)](out)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The language
# ---------------------------------------------------------------------------------------------------------------------

HALF = tl.constexpr(0.5)
DEGREE = tl.constexpr(3)


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _mean_and_variance(x, n, mask, EPS: tl.constexpr = 0.0):
    """Return two results from a helper that calls another helper."""
    mean = tl.sum(x) / n
    return mean, tl.sum(tl.where(mask, _square(x - mean), 0.0)) / n + EPS


@triton.jit
def normalize(x, out, mean_out, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    mask = offs < n
    value = tl.load(x + row * n + offs, mask=mask, other=0.0)
    mean, variance = _mean_and_variance(value, n, mask, EPS=1e-5)
    tl.store(mean_out + row, mean)
    tl.store(out + row * n + offs, (value - mean) * tl.rsqrt(variance), mask=mask)


@equals(lambda: (torch.layer_norm(randn(3, 50), [50]), randn(3, 50).mean(1)), exact=False)
def helpers_that_return_tuples():
    out, mean = torch.empty(3, 50), torch.empty(3)
    normalize[(3,)](randn(3, 50), out, mean, 50, BLOCK=64)
    return out, mean


@triton.jit
def power_of_half(x, out, SQUARE: tl.constexpr, BLOCK: tl.constexpr):
    """Use constexpr globals, an unrolled loop and a constexpr branch."""
    tl.static_assert(BLOCK >= 16)
    offs = tl.max_contiguous(tl.multiple_of(tl.program_id(0) * BLOCK, BLOCK) + tl.arange(0, BLOCK), BLOCK)
    value = tl.load(x + offs, eviction_policy="evict_first")
    result = tl.full([BLOCK], 1.0, tl.float32)
    for _ in tl.static_range(DEGREE):
        result *= HALF * value
    if SQUARE:
        result = _square(result)
    tl.store(out + offs, result, cache_modifier=".cs")


@equals(lambda: (randn(64) / 2).pow(3).pow(2), exact=False)
def constants_and_unrolled_loops():
    out = torch.empty(64)
    power_of_half[(2,)](randn(64), out, SQUARE=True, BLOCK=32)
    return out


def kernel_that_applies(function):
    @triton.jit
    def apply(x, out, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        tl.store(out + offs, function(tl.load(x + offs)))

    return apply


apply_square = kernel_that_applies(_square)


@equals(lambda: randn(32).square())
def function_from_a_closure():
    out = torch.empty(32)
    apply_square[(1,)](randn(32), out, BLOCK=32)
    return out


@triton.jit
def apply_given(x, out, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, FUNCTION(tl.load(x + offs)))


@equals(lambda: randn(32).square())
def function_as_an_argument():
    out = torch.empty(32)
    apply_given[(1,)](randn(32), out, FUNCTION=_square, BLOCK=32)
    return out


@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=2)], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def copy_tuned(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Skip the mask if the heuristic says that the tiles are even."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + offs, tl.load(x + offs))
    else:
        tl.store(out + offs, tl.load(x + offs, mask=offs < n), mask=offs < n)


@equals(lambda: (randn(64), randn(65)))
def autotuned_with_heuristics():
    even, odd = torch.empty(64), torch.empty(65)
    for out in (even, odd):
        copy_tuned[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](randn(out.numel()), out, out.numel())
    return even, odd


@triton.jit
def first_maximum(x, values, places, n, BLOCK: tl.constexpr):
    """Argmax with ties broken to the left."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + row * n + offs, mask=offs < n, other=-float("inf"))
    largest, place = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values + row, largest)
    tl.store(places + row, place)


@equals(lambda: (torch.tensor([2.0, 0.0, -1.0]), torch.tensor([1, 0, 2], dtype=torch.int32)))
def ties():
    x = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [-2, -2, -1, -1, -3]])
    values, places = torch.empty(3), torch.empty(3, dtype=torch.int32)
    first_maximum[(3,)](x, values, places, 5, BLOCK=8)
    return values, places


@triton.jit
def _then(decay_a, value_a, decay_b, value_b):
    """Compose two steps, a then b, of y = decay * y + value."""
    return decay_a * decay_b, value_a * decay_b + value_b


@triton.jit
def recurrence(decay, x, out, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """Scan with an operator that is not commutative."""
    offs = tl.arange(0, ROWS)[:, None] * STEPS + tl.arange(0, STEPS)[None, :]
    _, value = tl.associative_scan((tl.load(decay + offs), tl.load(x + offs)), 1, _then)
    tl.store(out + offs, value)


def recurrent() -> Tensor:
    decay, x = randn(4, 32).sigmoid(), randn(4, 32, seed=1)
    state, out = torch.zeros(4), []
    for step in range(32):
        state = decay[:, step] * state + x[:, step]
        out.append(state)
    return torch.stack(out, 1)


@equals(recurrent, exact=False)
def scan_of_pairs():
    out = torch.empty(4, 32)
    recurrence[(1,)](randn(4, 32).sigmoid(), randn(4, 32, seed=1), out, ROWS=4, STEPS=32)
    return out


@triton.jit
def _merge(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    weight = tl.where(count == 0.0, 0.0, count_b / count)
    delta = mean_b - mean_a
    return mean_a + delta * weight, m2_a + m2_b + delta * delta * count_a * weight, count


@triton.jit
def welford(x, out, n, BLOCK: tl.constexpr):
    """Reduce three values at once; masked lanes have a count of zero."""
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    mask = offs < n
    value = tl.load(x + row * n + offs, mask=mask, other=0.0)
    mean, m2, count = tl.reduce((value, tl.zeros_like(value), mask.to(tl.float32)), 0, _merge)
    tl.store(out + 2 * row, mean)
    tl.store(out + 2 * row + 1, m2 / count)


@equals(lambda: torch.stack([randn(3, 50).mean(1), randn(3, 50).var(1, correction=0)], 1), exact=False)
def reduction_of_three_values():
    out = torch.empty(3, 2)
    welford[(3,)](randn(3, 50), out, 50, BLOCK=64)
    return out


@triton.jit
def reorder(x, index, ordered, flipped, gathered, summed, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.arange(0, 4)[:, None] * BLOCK
    value = tl.load(x + row + offs[None, :])
    at = row + offs[None, :]
    tl.store(ordered + at, tl.sort(value))
    tl.store(flipped + at, tl.flip(value, 1))
    tl.store(gathered + at, tl.gather(value, tl.load(index + at), 1))
    tl.store(summed + at, tl.cumsum(value, 1, reverse=True))


def permutations() -> Tensor:
    return randn(4, 16, seed=1).argsort(1).int()


def reordered() -> tuple[Tensor, ...]:
    x = (randn(4, 16) * 4).round()
    return x.sort(1).values, x.flip(1), x.gather(1, permutations().long()), x.flip(1).cumsum(1).flip(1)


@equals(reordered)
def sorted_flipped_gathered():
    outs = tuple(torch.empty(4, 16) for _ in range(4))
    reorder[(1,)]((randn(4, 16) * 4).round(), permutations(), *outs, BLOCK=16)
    return outs


@triton.jit
def count_bytes(x, counts, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a histogram per program and add them up atomically."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, mask=offs < n, other=0).to(tl.int32)
    found = tl.histogram(value, BINS)
    bins = tl.arange(0, BINS)
    found -= tl.where(bins == 0, tl.sum((offs >= n).to(tl.int32)), 0)  # masked lanes were counted as 0
    tl.atomic_add(counts + bins, found)


@equals(lambda: torch.bincount(torch.arange(100) * 7 % 16, minlength=16).int())
def histogram():
    counts = torch.zeros(16, dtype=torch.int32)
    count_bytes[(2,)]((torch.arange(100) * 7 % 16).to(torch.uint8), counts, 100, BINS=16, BLOCK=64)
    return counts


@triton.jit
def swap_pairs(x, out, BLOCK: tl.constexpr):
    """Reshape, split, join and transpose, so that every lane moves."""
    value = tl.load(x + tl.arange(0, BLOCK))
    even, odd = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
    swapped = tl.reshape(tl.trans(tl.join(odd, even)), (BLOCK,))
    tl.store(out + tl.arange(0, BLOCK), swapped)


@equals(lambda: torch.cat([randn(32)[1::2], randn(32)[0::2]]))
def lanes_are_permuted():
    out = torch.empty(32)
    swap_pairs[(1,)](randn(32), out, BLOCK=32)
    return out


@triton.jit
def both_or_neither(a, b, out, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(a + offs, mask=offs < n, other=0)
    y = tl.load(b + offs, mask=offs < n, other=0)
    tl.store(out + offs, x == y, mask=offs < n)


@equals(lambda: (randn(50) > 0) == (randn(50, seed=1) > 0))
def bools():
    out = torch.empty(50, dtype=torch.bool)
    both_or_neither[(1,)](randn(50) > 0, randn(50, seed=1) > 0, out, 50, BLOCK=64)
    return out


@triton.jit
def cast(x, out, n, BLOCK: tl.constexpr):
    """Convert any type to that of out."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, mask=offs < n)
    tl.store(out + offs, value.to(out.dtype.element_ty), mask=offs < n)


def casted(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast[(2,)](x, out, x.numel(), BLOCK=64)
    return out


@equals(lambda: (randn(100).to(torch.float8_e4m3fn).float(), randn(100).to(torch.float8_e5m2).float()))
def float8_to_float32():
    return tuple(casted(randn(100).to(dtype), torch.float32) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))


@equals(lambda: (randn(100).bfloat16(), randn(100).half(), randn(100).half().float()))
def halves_of_float32():
    return (
        casted(randn(100), torch.bfloat16),
        casted(randn(100), torch.float16),
        casted(randn(100).half(), torch.float32),
    )


@equals(lambda: randn(100).to(torch.float8_e4m3fn))
def float32_to_float8():
    return casted(randn(100), torch.float8_e4m3fn)
