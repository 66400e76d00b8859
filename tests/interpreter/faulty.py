"""Small Triton kernels with one planted fault each, and the finding that the interpreter has to report.

The faulty line ends in the comment "fault"; a race between a read and a write has two such lines. Outputs that are
never written have no line. VALUE_FAULTS access memory correctly; only their values are wrong.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.interpreter.results import NEVER_WRITTEN, OUT_OF_BOUNDS, OVERFLOW, RACE, READ_BEFORE_WRITE

Tensors = Tensor | tuple[Tensor, ...]
MARK = "# fault"


@dataclass(frozen=True)
class Fault:
    """One launch and the finding it has to produce; a field that is None is not checked."""

    name: str
    kind: str
    argument: str
    kernel: Any  # the @triton.jit function
    run: Callable[[], Tensors]
    helper: Any = None  # the function with the fault, if it is not the kernel itself
    program: tuple[int, int, int] | None = None
    element: tuple[int, ...] | None = None
    lanes: int | None = None
    consequences: frozenset[tuple[str, str]] = frozenset()  # (kind, argument) of further findings that may follow

    @property
    def lines(self) -> set[int]:
        text, first = inspect.getsourcelines((self.helper or self.kernel).fn)
        return {number for number, line in enumerate(text, first) if line.rstrip().endswith(MARK)}


@dataclass(frozen=True)
class ValueFault:
    """A launch with a wrong result: `wrong` is what the hardware computes, `reference` the intended result."""

    name: str
    run: Callable[[], Tensor]
    wrong: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    min_error: float  # the largest difference between result and reference exceeds this


FAULTS: list[Fault] = []
VALUE_FAULTS: list[ValueFault] = []


def planted(kind: str, argument: str, kernel: Any, *, consequences=(), **expected: Any):
    """Register a launch function in FAULTS."""

    def register(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        FAULTS.append(
            Fault(run.__name__, kind, argument, kernel, run, consequences=frozenset(consequences), **expected)
        )
        return run

    return register


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the same random values at every call, on torch's default device."""
    device = torch.get_default_device()
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def untouched_zeros(count: int) -> Tensor:
    """Return int8 zeros whose pages take no memory until they are written."""
    return torch.from_numpy(np.zeros(count, np.int8)).to(torch.get_default_device())


# ---------------------------------------------------------------------------------------------------------------------
# Out of bounds
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def mask_one_too_far(x, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, mask=offs <= n)  # fault
    tl.store(out + offs, value, mask=offs < n)


@planted(OUT_OF_BOUNDS, "x", mask_one_too_far, program=(1, 0, 0), element=(100,), lanes=1)
def load_mask_off_by_one():
    x = randn(100)
    out = torch.empty_like(x)
    mask_one_too_far[(2,)](x, out, 100, BLOCK=64)
    return out


@triton.jit
def load_lacks_mask(x, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs)  # fault
    tl.store(out + offs, value, mask=offs < n)


@planted(OUT_OF_BOUNDS, "x", load_lacks_mask, program=(1, 0, 0), element=(100,), lanes=28)
def load_without_mask():
    x = randn(100)
    out = torch.empty_like(x)
    load_lacks_mask[(2,)](x, out, 100, BLOCK=64)
    return out


@planted(OUT_OF_BOUNDS, "x", load_lacks_mask, program=(1, 0, 0), element=(100,), lanes=28)
def end_of_a_view_in_a_larger_storage():
    x = randn(256)[:100]
    out = torch.empty(100)
    load_lacks_mask[(2,)](x, out, 100, BLOCK=64)
    return out


@triton.jit
def store_lacks_mask(x, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, mask=offs < n)
    tl.store(out + offs, value)  # fault


@planted(OUT_OF_BOUNDS, "out", store_lacks_mask, program=(1, 0, 0), element=(100,), lanes=28)
def store_without_mask():
    x = randn(100)
    out = torch.empty_like(x)
    store_lacks_mask[(2,)](x, out, 100, BLOCK=64)
    return out


@planted(OUT_OF_BOUNDS, "out", store_lacks_mask, program=(1, 0, 0), element=(100,), lanes=28)
def store_into_the_neighbour_in_one_storage():
    left, _right = torch.empty(200).split(100)
    store_lacks_mask[(2,)](randn(100), left, 100, BLOCK=64)
    return left


@triton.jit
def copy_row(x, out, stride, columns, BLOCK: tl.constexpr):
    """Correct if `stride` is the row stride of x; out is contiguous."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + offs, mask=offs < columns)  # fault
    tl.store(out + row * columns + offs, value, mask=offs < columns)


@planted(OUT_OF_BOUNDS, "x", copy_row, program=(1, 0, 0), element=(100,), lanes=28 + 28 + 28 + 16 + 12)
def row_stride_of_a_contiguous_tensor():
    x = randn(6, 128)[:, :100]
    out = torch.empty(6, 100)
    copy_row[(6,)](x, out, x.shape[1], 100, BLOCK=128)
    return out


@planted(OUT_OF_BOUNDS, "x", copy_row, program=(0, 0, 0), element=(1,), lanes=25)
def gaps_of_every_other_element():
    out = torch.empty(50)
    copy_row[(1,)](randn(100)[::2], out, 100, 50, BLOCK=64)
    return out


@triton.jit
def copy_row_without_column_mask(x, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + offs)  # fault
    tl.store(out + row * columns + offs, value, mask=offs < columns)


@planted(OUT_OF_BOUNDS, "x", copy_row_without_column_mask, program=(0, 0, 0), element=(100,), lanes=4 * 28)
def gap_of_a_padded_view():
    x = randn(4, 128)[:, :100]
    out = torch.empty(4, 100)
    copy_row_without_column_mask[(4,)](x, out, x.stride(0), 100, BLOCK=128)
    return out


@triton.jit
def copy_tile(x, out, stride_row, stride_column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Correct if the strides are those of x, in this order; out is contiguous."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    value = tl.load(x + row * stride_row + column * stride_column, mask=mask)  # fault
    tl.store(out + row * columns + column, value, mask=mask)


@planted(OUT_OF_BOUNDS, "x", copy_tile, program=(0, 0, 0), element=(8 * 24,), lanes=16 * 8)
def strides_transposed():
    x = randn(8, 24)
    out = torch.empty_like(x)
    copy_tile[(1,)](x, out, x.stride(1), x.stride(0), 8, 24, ROWS=8, COLUMNS=32)
    return out


@triton.jit
def halo_lacks_left_guard(x, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(x + offs, mask=offs < n)
    left = tl.load(x + offs - 1, mask=offs < n)  # fault
    tl.store(out + offs, here - left, mask=offs < n)


@planted(OUT_OF_BOUNDS, "x", halo_lacks_left_guard, program=(0, 0, 0), element=(-1,), lanes=1)
def negative_offset():
    x = randn(100)
    out = torch.empty_like(x)
    halo_lacks_left_guard[(2,)](x, out, 100, BLOCK=64)
    return out


@triton.jit
def reverse_by_one_too_many(x, out, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + n - offs, mask=offs < n)  # fault
    tl.store(out + offs, value, mask=offs < n)


@planted(OUT_OF_BOUNDS, "x", reverse_by_one_too_many, program=(0, 0, 0), element=(100,), lanes=1)
def reversed_from_the_length():
    x = randn(100)
    out = torch.empty_like(x)
    reverse_by_one_too_many[(1,)](x, out, 100, BLOCK=128)
    return out


@triton.jit
def count_into_bins(x, counts, n, bins, BLOCK: tl.constexpr):
    """Bin values from 0 to 1 inclusive: 1 belongs in the last bin, not after it."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = (tl.load(x + offs, mask=offs < n, other=0.0) * bins).to(tl.int32)
    tl.atomic_add(counts + index, 1, mask=offs < n)  # fault


@planted(OUT_OF_BOUNDS, "counts", count_into_bins, program=(1, 0, 0), element=(8,), lanes=1)
def atomic_past_the_end():
    counts = torch.zeros(8, dtype=torch.int32)
    count_into_bins[(2,)](torch.linspace(0, 1, 100), counts, 100, 8, BLOCK=64)
    return counts


@triton.jit
def look_up(table, index, out, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    at = tl.load(index + offs, mask=offs < n, other=0)
    value = tl.load(table + at, mask=offs < n)  # fault
    tl.store(out + offs, value, mask=offs < n)


@planted(OUT_OF_BOUNDS, "table", look_up, program=(0, 0, 0), element=(10,), lanes=3)
def gather_with_one_based_indices():
    index = torch.arange(30) % 10 + 1
    out = torch.empty(30)
    look_up[(1,)](randn(10), index, out, 30, BLOCK=32)
    return out


@triton.jit
def add_shorter(x, y, out, n_x, n_y, BLOCK: tl.constexpr):
    """Compute out = y, plus x on the elements that x has."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offs, mask=offs < n_x, other=0.0)  # fault
    b = tl.load(y + offs, mask=offs < tl.maximum(n_x, n_y), other=0.0)
    tl.store(out + offs, a + b, mask=offs < tl.maximum(n_x, n_y))


@planted(OUT_OF_BOUNDS, "x", add_shorter, program=(0, 0, 0), element=(50,), lanes=50)
def lengths_swapped():
    x, y = randn(50), randn(100)
    out = torch.empty_like(y)
    add_shorter[(2,)](x, y, out, y.numel(), x.numel(), BLOCK=64)
    return out


@triton.jit
def row_lengths(starts, out):
    row = tl.program_id(0)
    start = tl.load(starts + row)
    end = tl.load(starts + row + 1)  # fault
    tl.store(out + row, end - start)


@planted(OUT_OF_BOUNDS, "starts", row_lengths, program=(4, 0, 0), element=(5,), lanes=1)
def scalar_past_the_end():
    starts = torch.tensor([0, 3, 3, 8, 12])  # the end of the last row is missing
    out = torch.empty_like(starts)
    row_lengths[(5,)](starts, out)
    return out


@triton.jit
def sum_with_one_step_too_many(x, out, n, BLOCK: tl.constexpr):
    ptrs = x + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for _ in range(n // BLOCK + 1):
        acc += tl.load(ptrs)  # fault
        ptrs += BLOCK
    tl.store(out, tl.sum(acc))


@planted(OUT_OF_BOUNDS, "x", sum_with_one_step_too_many, program=(0, 0, 0), element=(128,), lanes=32)
def loop_goes_one_step_too_far():
    out = torch.empty(1)
    sum_with_one_step_too_many[(1,)](randn(128), out, 128, BLOCK=32)
    return out


@triton.jit
def _put(ptrs, value):
    tl.store(ptrs, value)  # fault


@triton.jit
def store_in_a_helper(x, out, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    _put(out + offs, tl.load(x + offs, mask=offs < n))


@planted(OUT_OF_BOUNDS, "out", store_in_a_helper, helper=_put, program=(0, 0, 0), element=(50,), lanes=14)
def helper_without_mask():
    x = randn(50)
    out = torch.empty_like(x)
    store_in_a_helper[(1,)](x, out, 50, BLOCK=64)
    return out


@triton.jit
def read_one_of_two(a, b, out, n, BLOCK: tl.constexpr):
    """Read a in even programs and b, which is shorter, in odd ones."""
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    source = a if pid % 2 == 0 else b
    value = tl.load(source + offs, mask=offs < n)  # fault
    tl.store(out + pid * n + offs, value, mask=offs < n)


@planted(OUT_OF_BOUNDS, "b", read_one_of_two, program=(1, 0, 0), element=(40,), lanes=2 * 10)
def shorter_of_two_tensors():
    out = torch.empty(4, 50)
    read_one_of_two[(4,)](randn(50), randn(40), out, 50, BLOCK=64)
    return out


@triton.jit
def bytes_as_words(x, out, n, BLOCK: tl.constexpr):
    """Read bytes as 32-bit words; n counts bytes."""
    offs = tl.arange(0, BLOCK)
    words = x.to(tl.pointer_type(tl.int32), bitcast=True)
    value = tl.load(words + offs, mask=offs < n)  # fault
    tl.store(out + offs, value, mask=offs < n // 4)


@planted(OUT_OF_BOUNDS, "x", bytes_as_words, program=(0, 0, 0), element=(64,), lanes=48)
def wider_elements_than_counted():
    x = torch.arange(64, dtype=torch.int8)
    out = torch.empty(16, dtype=torch.int32)
    bytes_as_words[(1,)](x, out, 64, BLOCK=64)
    return out


@planted(OUT_OF_BOUNDS, "x", bytes_as_words, program=(0, 0, 0), element=(60,), lanes=1)
def a_wide_element_that_begins_inside():
    x = torch.arange(63, dtype=torch.int8)
    out = torch.empty(4, dtype=torch.int32)
    bytes_as_words[(1,)](x, out, 16, BLOCK=64)
    return out


@planted(OUT_OF_BOUNDS, "x", bytes_as_words, program=(0, 0, 0), element=(0, 0), lanes=16)
def a_wide_element_that_reaches_into_a_gap():
    x = torch.arange(64, dtype=torch.int8).view(16, 4)[:, :3]
    out = torch.empty(4, dtype=torch.int32)
    bytes_as_words[(1,)](x, out, 16, BLOCK=64)
    return out


@triton.jit
def copy_described(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Correct if `rows` is the number of rows of x."""
    described = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    start = tl.program_id(0) * ROWS
    value = described.load([start, 0])  # fault
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(out + row * columns + column, value, mask=(row < 24) & (column < columns))


@planted(OUT_OF_BOUNDS, "x", copy_described, program=(1, 0, 0), element=(24 * 32,), lanes=8 * 32)
def descriptor_declares_too_many_rows():
    x = randn(24, 32)
    out = torch.empty_like(x)
    copy_described[(2,)](x, out, 32, 32, ROWS=16, COLUMNS=32)
    return out


@triton.jit
def copy_host_described(x, out, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy through a descriptor created by the caller."""
    start = tl.program_id(0) * ROWS
    value = x.load([start, 0])  # fault
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(out + row * COLUMNS + column, value, mask=row < rows)


@planted(OUT_OF_BOUNDS, "x", copy_host_described, program=(1, 0, 0), element=(24 * 32,), lanes=8 * 32)
def host_descriptor_declares_too_many_rows():
    x = randn(24, 32)
    out = torch.empty_like(x)
    copy_host_described[(2,)](TensorDescriptor(x, [32, 32], [32, 1], [16, 32]), out, 24, ROWS=16, COLUMNS=32)
    return out


@triton.jit
def store_described(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    described = tl.make_tensor_descriptor(out, [rows + 1, columns], [columns, 1], [ROWS, COLUMNS])
    start = tl.program_id(0) * ROWS
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    value = tl.load(x + row * columns + column, mask=row < rows)
    described.store([start, 0], value)  # fault


@planted(OUT_OF_BOUNDS, "out", store_described, program=(1, 0, 0), element=(24 * 32,), lanes=32)
def descriptor_stores_one_row_too_many():
    x = randn(24, 32)
    out = torch.empty_like(x)
    store_described[(2,)](x, out, 24, 32, ROWS=16, COLUMNS=32)
    return out


if hasattr(TritonSemantic, "make_block_ptr"):  # not in every version of Triton

    @triton.jit
    def copy_blocks(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        start = tl.program_id(0) * ROWS
        source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (start, 0), (ROWS, COLUMNS), (1, 0))
        target = tl.make_block_ptr(out, (rows, columns), (columns, 1), (start, 0), (ROWS, COLUMNS), (1, 0))
        value = tl.load(source)  # fault
        tl.store(target, value, boundary_check=(0, 1))

    @planted(OUT_OF_BOUNDS, "x", copy_blocks, program=(1, 0, 0), element=(24 * 32,), lanes=8 * 32)
    def block_pointer_without_boundary_check():
        x = randn(24, 32)
        out = torch.empty_like(x)
        copy_blocks[(2,)](x, out, 24, 32, ROWS=16, COLUMNS=32)
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Races
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def reverse_through_memory(x, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    scratch = out + tl.program_id(0) * 2 * BLOCK
    tl.store(scratch + offs, tl.load(x + offs))
    reversed_again = tl.load(scratch + BLOCK - 1 - offs)  # fault
    tl.store(scratch + BLOCK + offs, reversed_again)


@planted(RACE, "out", reverse_through_memory, program=(0, 0, 0), element=(0, 255), lanes=2 * 256)
def warps_that_load_what_others_store():
    out = torch.empty(2, 512)
    reverse_through_memory[(2,)](randn(256), out, BLOCK=256)
    return out


@triton.jit
def last_of_a_block(x, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, tl.load(x + offs))
    tl.store(out + BLOCK, tl.load(out + BLOCK - 1))  # fault


@planted(RACE, "out", last_of_a_block, program=(0, 0, 0), element=(255,), lanes=1)
def all_warps_load_what_the_last_stores():
    out = torch.empty(257)
    last_of_a_block[(1,)](randn(256), out, BLOCK=256)
    return out


@triton.jit
def sum_into_one(x, out, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + offs)))  # fault


@planted(RACE, "out", sum_into_one, element=(0,))
def partial_sums_into_one_element():
    out = torch.empty(1)
    sum_into_one[(4,)](randn(128), out, BLOCK=32)
    return out


@triton.jit
def add_into_one(x, out, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out)  # fault
    tl.store(out, before + tl.sum(tl.load(x + offs)))  # fault


@planted(RACE, "out", add_into_one, element=(0,))
def read_modify_write_without_atomics():
    out = torch.zeros(1)
    add_into_one[(4,)](randn(128), out, BLOCK=32)
    return out


@triton.jit
def histogram_without_atomics(x, counts, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(x + offs)
    before = tl.load(counts + index)  # fault
    tl.store(counts + index, before + 1)  # fault


@planted(RACE, "counts", histogram_without_atomics)
def histogram_loses_counts():
    counts = torch.zeros(8, dtype=torch.int32)
    histogram_without_atomics[(4,)](torch.arange(64) * 5 % 8, counts, BLOCK=16)
    return counts


@triton.jit
def shift_in_place(y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs > 0) & (offs < n)
    value = tl.load(y + offs - 1, mask=mask)  # fault
    tl.store(y + offs, value, mask=mask)  # fault


@planted(RACE, "y", shift_in_place, element=(63,))
def in_place_shift_across_blocks():
    y = randn(100)
    shift_in_place[(2,)](y, 100, BLOCK=64)
    return y


@triton.jit
def blur(x, out, n, BLOCK: tl.constexpr):
    """Correct if x and out do not alias."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    right = tl.load(x + offs + 1, mask=offs + 1 < n, other=0.0)  # fault
    here = tl.load(x + offs, mask=offs < n)
    tl.store(out + offs, (here + right) / 2, mask=offs < n)  # fault


@planted(RACE, "out", blur, consequences=[(RACE, "x")], element=(64,))
def stencil_given_its_input_as_output():
    x = randn(128)
    blur[(2,)](x, x, 128, BLOCK=64)
    return x


@triton.jit
def sum_with_left_neighbour(x, sums, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    own = tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK)))
    tl.store(sums + pid, own)  # fault
    left = tl.load(sums + pid - 1, mask=pid > 0, other=0.0)  # fault
    tl.store(out + pid, own + left)


@planted(RACE, "sums", sum_with_left_neighbour)
def no_wait_for_the_left_neighbour():
    sums, out = torch.zeros(4), torch.empty(4)
    sum_with_left_neighbour[(4,)](randn(128), sums, out, BLOCK=32)
    return out


@triton.jit
def two_lanes_to_one_element(x, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs // 2, tl.load(x + offs))  # fault


@planted(RACE, "out", two_lanes_to_one_element, program=(0, 0, 0), element=(0,))
def lanes_of_one_store():
    out = torch.empty(16)
    two_lanes_to_one_element[(1,)](randn(32), out, BLOCK=32)
    return out


@triton.jit
def copy_without_program_id(x, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * BLOCK + offs)
    tl.store(out + offs, value)  # fault


@planted(RACE, "out", copy_without_program_id, element=(0,), consequences=[(NEVER_WRITTEN, "out")])
def every_program_writes_the_first_block():
    out = torch.empty(64)
    copy_without_program_id[(2,)](randn(64), out, BLOCK=32)
    return out


@triton.jit
def copy_row_by_strides(x, out, stride_x, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    tl.store(out + row * stride_out + offs, tl.load(x + row * stride_x + offs))  # fault


@planted(RACE, "out", copy_row_by_strides)
def rows_of_an_expanded_output():
    x = randn(4, 32)
    out = torch.empty(1, 32).expand(4, 32)
    copy_row_by_strides[(4,)](x, out, x.stride(0), out.stride(0), BLOCK=32)
    return out


@triton.jit
def last_adds_up_unordered(x, parts, arrived, out, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    part = tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK)))
    tl.store(parts + pid, part)  # fault
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="relaxed")  # does not synchronize; acq_rel would
    if before == PROGRAMS - 1:
        total = tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)))  # fault
        tl.store(out, total)


@planted(RACE, "parts", last_adds_up_unordered)
def relaxed_counter_does_not_synchronize():
    parts, arrived, out = torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1)
    last_adds_up_unordered[(4,)](randn(128), parts, arrived, out, BLOCK=32, PROGRAMS=4)
    return out


@triton.jit
def add_under_a_relaxed_lock(x, lock, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * BLOCK + offs)
    while tl.atomic_cas(lock, 0, 1, sem="relaxed") == 1:
        pass
    before = tl.load(out + offs)  # fault
    tl.store(out + offs, before + value)  # fault
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="relaxed")


@planted(RACE, "out", add_under_a_relaxed_lock)
def relaxed_lock_does_not_synchronize():
    lock, out = torch.zeros(1, dtype=torch.int32), torch.zeros(32)
    add_under_a_relaxed_lock[(4,)](randn(128), lock, out, BLOCK=32)
    return out


@triton.jit
def count_before_storing(x, parts, arrived, out, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    tl.store(parts + pid, tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))))  # fault
    if before == PROGRAMS - 1:
        total = tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)))  # fault
        tl.store(out, total)


@planted(RACE, "parts", count_before_storing)
def arrival_signalled_before_the_store():
    parts, arrived, out = torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1)
    count_before_storing[(4,)](randn(128), parts, arrived, out, BLOCK=32, PROGRAMS=4)
    return out


@triton.jit
def count_and_load(x, counter, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    positive = tl.sum((tl.load(x + pid * BLOCK + tl.arange(0, BLOCK)) > 0).to(tl.int32))
    tl.atomic_add(counter, positive, sem="relaxed")  # fault
    count = tl.load(counter)  # fault
    tl.store(out + pid, count)


@planted(RACE, "counter", count_and_load, element=(0,))
def plain_read_of_an_atomic_counter():
    counter, out = torch.zeros(1, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    count_and_load[(4,)](randn(128), counter, out, BLOCK=32)
    return out


@triton.jit
def add_within_a_block(x, total, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)))
    tl.atomic_add(total, part, scope="cta")  # fault


@planted(RACE, "total", add_within_a_block, element=(0,))
def atomics_with_cta_scope():
    total = torch.zeros(1)
    add_within_a_block[(4,)](randn(128), total, BLOCK=32)
    return total


@triton.jit
def store_program_id(out):
    tl.store(out, tl.program_id(0))  # fault


@planted(RACE, "out", store_program_id, element=(0,))
def one_of_two_writers_changes_nothing():
    out = torch.zeros(1, dtype=torch.int32)
    store_program_id[(2,)](out)
    return out


@triton.jit
def clear_then_count(x, total, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(total, 0.0)  # fault
    tl.atomic_add(total, tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))))  # fault


@planted(RACE, "total", clear_then_count, element=(0,))
def store_races_with_atomics():
    total = torch.ones(1)
    clear_then_count[(4,)](randn(128), total, BLOCK=32)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Never written
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    """Correct if the grid covers n."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offs, 2 * tl.load(x + offs, mask=offs < n), mask=offs < n)


@planted(NEVER_WRITTEN, "out", double, element=(64,), lanes=36)
def tail_beyond_the_grid():
    x = randn(100)
    out = torch.empty_like(x)
    double[(100 // 64,)](x, out, 100, BLOCK=64)
    return out


@triton.jit
def double_every_other_row(x, out, columns, BLOCK: tl.constexpr):
    offs = 2 * tl.program_id(0) * columns + tl.arange(0, BLOCK)
    tl.store(out + offs, 2 * tl.load(x + offs))


@planted(NEVER_WRITTEN, "out", double_every_other_row, element=(1, 0), lanes=3 * 32)
def rows_left_out():
    x = randn(6, 32)
    out = torch.empty_like(x)
    double_every_other_row[(3,)](x, out, 32, BLOCK=32)
    return out


@triton.jit
def double_all_but_the_last_column(x, out, columns, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    tl.store(out + row + offs, 2 * tl.load(x + row + offs, mask=offs < columns), mask=offs < columns - 1)


@planted(NEVER_WRITTEN, "out", double_all_but_the_last_column, element=(0, 49), lanes=3)
def column_left_out():
    x = randn(3, 50)
    out = torch.empty_like(x)
    double_all_but_the_last_column[(3,)](x, out, 50, BLOCK=64)
    return out


@triton.jit
def double_positive(x, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + offs)
    tl.store(out + offs, 2 * value, mask=value > 0)


@planted(NEVER_WRITTEN, "out", double_positive, element=(3,), lanes=29)
def mask_by_value():
    x = torch.arange(32.0)
    x[3:] *= -1
    x[0] = 1
    out = torch.empty_like(x)
    double_positive[(1,)](x, out, BLOCK=32)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Read before write
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def add_to(x, out, n, BLOCK: tl.constexpr):
    """Correct if out is initialized."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out + offs, mask=offs < n)  # fault
    tl.store(out + offs, before + tl.load(x + offs, mask=offs < n), mask=offs < n)


@planted(READ_BEFORE_WRITE, "out", add_to, program=(0, 0, 0), element=(0,), lanes=100)
def accumulates_into_empty():
    x = randn(100)
    out = torch.empty_like(x)
    add_to[(2,)](x, out, 100, BLOCK=64)
    return out


@triton.jit
def add_atomically(x, out, n, BLOCK: tl.constexpr):
    """Correct if out is initialized."""
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * n + offs, mask=offs < n)
    tl.atomic_add(out + offs, value, mask=offs < n)  # fault


@planted(READ_BEFORE_WRITE, "out", add_atomically, program=(0, 0, 0), element=(0,))
def atomics_into_empty():
    out = torch.empty(50)
    add_atomically[(4,)](randn(4, 50), out, 50, BLOCK=64)
    return out


@triton.jit
def multiply_part(a, b, parts, k, BLOCK: tl.constexpr):
    """Multiply one slice of k per program."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(a + offs, mask=offs < k, other=0.0) * tl.load(b + offs, mask=offs < k, other=0.0)
    tl.store(parts + tl.program_id(0), tl.sum(product))


@triton.jit
def add_parts(parts, out, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(parts + offs, mask=offs < count, other=0.0)  # fault
    tl.store(out, tl.sum(value))


@planted(READ_BEFORE_WRITE, "parts", add_parts, program=(0, 0, 0), element=(3,), lanes=1)
def split_k_scratch_not_initialized():
    k = 100
    parts, out = torch.empty(triton.cdiv(k, 32)), torch.empty(1)
    multiply_part[(k // 32,)](randn(k), randn(k, seed=1), parts, k, BLOCK=32)
    add_parts[(1,)](parts, out, parts.numel(), BLOCK=16)
    return out


@triton.jit
def sum_padded_row(x, out, stride, BLOCK: tl.constexpr):
    """Correct if the padding is zero."""
    row = tl.program_id(0)
    value = tl.load(x + row * stride + tl.arange(0, BLOCK))  # fault
    tl.store(out + row, tl.sum(value))


@planted(READ_BEFORE_WRITE, "x", sum_padded_row, program=(0, 0, 0), element=(0, 32), lanes=3 * 32)
def padding_not_initialized():
    padded, out = torch.empty(3, 64), torch.empty(3)
    copy_row_by_strides[(3,)](randn(3, 32), padded, 32, 64, BLOCK=32)
    sum_padded_row[(3,)](padded, out, 64, BLOCK=64)
    return out


@triton.jit
def add_triangle(a, out, n, BLOCK: tl.constexpr):
    """Sum the rows of a lower triangle; the mask keeps one diagonal too many."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tile = tl.load(a + row * BLOCK + column)  # fault
    tile = tl.where(column <= row + 1, 2 * tile, 0.0)
    tl.store(out + tl.arange(0, BLOCK), tl.sum(tile, 1))


@triton.jit
def write_triangle(x, a, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    offs = row * BLOCK + column
    tl.store(a + offs, tl.load(x + offs), mask=column <= row)


@planted(READ_BEFORE_WRITE, "a", add_triangle, program=(0, 0, 0), element=(0, 1))
def mask_keeps_unwritten_diagonal():
    a, out = torch.empty(16, 16), torch.empty(16)
    write_triangle[(1,)](randn(16, 16), a, BLOCK=16)
    add_triangle[(1,)](a, out, 16, BLOCK=16)
    return out


@triton.jit
def gather_rows(x, rows, out, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.load(rows + offs)  # fault
    tl.store(out + offs, tl.load(x + row))


@planted(READ_BEFORE_WRITE, "rows", gather_rows, program=(0, 0, 0), element=(0,), lanes=16)
def address_not_written():
    out = torch.empty(16)
    gather_rows[(1,)](randn(16), torch.empty(16, dtype=torch.int64), out, BLOCK=16)
    return torch.zeros(1)


@triton.jit
def count_up_to(counts, out, BLOCK: tl.constexpr):
    total = 0
    for _ in range(tl.load(counts + tl.program_id(0))):  # fault
        total += 1
    tl.store(out + tl.program_id(0), total)


@planted(READ_BEFORE_WRITE, "counts", count_up_to, program=(0, 0, 0), element=(0,), lanes=2)
def trip_count_not_written():
    out = torch.empty(2, dtype=torch.int32)
    count_up_to[(2,)](torch.empty(2, dtype=torch.int32), out, BLOCK=1)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Offset overflow
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def mark_row(out, first, stride, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    start = row * stride  # fault
    tl.store(out + start + tl.arange(0, BLOCK), 1)


@planted(OVERFLOW, "out", mark_row, program=(1, 0, 0), lanes=16, consequences=[(OUT_OF_BOUNDS, "out")])
def row_times_stride():
    out = torch.empty(2**15 + 1, 2**16, dtype=torch.int8)
    mark_row[(2,)](out, 2**15 - 1, out.stride(0), BLOCK=16)
    return out[2**15 - 1, :16]


@triton.jit
def read_chunk_starts(x, out, CHUNK: tl.constexpr):
    pid = tl.program_id(0)
    start = pid * CHUNK  # fault
    tl.store(out + pid, tl.load(x + start))


@planted(OVERFLOW, "x", read_chunk_starts, program=(2, 0, 0), lanes=1, consequences=[(OUT_OF_BOUNDS, "x")])
def program_id_times_chunk():
    x = untouched_zeros(2**31 + 64)
    out = torch.empty(3, dtype=torch.int8)
    read_chunk_starts[(3,)](x, out, CHUNK=2**30)
    return out


@triton.jit
def read_from(x, out, start, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)  # fault
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + offs))


@planted(OVERFLOW, "x", read_from, program=(0, 0, 0), lanes=8, consequences=[(OUT_OF_BOUNDS, "x")])
def base_plus_arange():
    x = untouched_zeros(2**31 + 64)
    out = torch.empty(16, dtype=torch.int8)
    read_from[(1,)](x, out, 2**31 - 8, BLOCK=16)
    return out


@triton.jit
def read_column(x, out, stride, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Read rows 0, STEP, 2 STEP, ...; the product wraps around to an offset inside of x."""
    rows = tl.arange(0, BLOCK) * STEP
    offs = rows * stride  # fault
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + offs))


@planted(OVERFLOW, "x", read_column, program=(0, 0, 0), lanes=1)
def product_wraps_back_into_range():
    x = untouched_zeros(2**32 + 2**16)
    out = torch.empty(2, dtype=torch.int8)
    read_column[(1,)](x, out, 2**16, STEP=2**16, BLOCK=2)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Faults that only affect values
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def sum_in(x, out, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Accumulate n / BLOCK values per lane in DTYPE."""
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], DTYPE)
    for start in range(0, n, BLOCK):
        acc += tl.load(x + start + offs)
    tl.store(out, tl.sum(acc.to(tl.float32)))


def sum_of(value: float, dtype: torch.dtype, triton_dtype: tl.dtype) -> Tensor:
    out = torch.empty(1)
    sum_in[(1,)](torch.full((512 * 16,), value, dtype=dtype), out, 512 * 16, DTYPE=triton_dtype, BLOCK=16)
    return out


@triton.jit
def softmax_without_maximum(x, out, columns, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    numerator = tl.exp(tl.load(x + row + offs, mask=offs < columns, other=-float("inf")))
    tl.store(out + row + offs, numerator / tl.sum(numerator), mask=offs < columns)


def softmax_inputs() -> Tensor:
    x = randn(3, 50)
    x[1] += 100  # exp(100) is infinite in float32
    return x


def overflowing_softmax() -> Tensor:
    x = softmax_inputs()
    out = torch.empty_like(x)
    softmax_without_maximum[(3,)](x, out, 50, BLOCK=64)
    return out


@triton.jit
def sum_over_the_wrong_axis(x, out, BLOCK: tl.constexpr):
    """Sum columns instead of rows."""
    offs = tl.arange(0, BLOCK)
    value = tl.load(x + offs[:, None] * BLOCK + offs[None, :])
    tl.store(out + offs, tl.sum(value, axis=0))


def sums_of_columns() -> Tensor:
    out = torch.empty(16)
    sum_over_the_wrong_axis[(1,)](randn(16, 16), out, BLOCK=16)
    return out


@triton.jit
def maximum_with_zeros(x, out, columns, BLOCK: tl.constexpr):
    """Pad with 0 instead of -inf."""
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * columns + offs, mask=offs < columns, other=0.0)
    tl.store(out + row, tl.max(value))


def negatives() -> Tensor:
    return -1 - randn(3, 50).abs()


def maxima_of_negatives() -> Tensor:
    out = torch.empty(3)
    maximum_with_zeros[(3,)](negatives(), out, 50, BLOCK=64)
    return out


@triton.jit
def dot_in_bytes(x, y, out, BLOCK: tl.constexpr):
    """Multiply in int8, which wraps around, instead of int32."""
    offs = tl.arange(0, BLOCK)
    product = tl.load(x + offs) * tl.load(y + offs)
    tl.store(out, tl.sum(product.to(tl.int32)))


def byte_inputs() -> tuple[Tensor, Tensor]:
    x = torch.arange(-32, 32, dtype=torch.int8)
    return x, x + 7


def wrapping_dot() -> Tensor:
    out = torch.empty(1, dtype=torch.int32)
    dot_in_bytes[(1,)](*byte_inputs(), out, BLOCK=64)
    return out


VALUE_FAULTS += [
    ValueFault(
        "bfloat16_sum_stops_growing",  # 256 + 1 rounds to 256
        run=lambda: sum_of(1.0, torch.bfloat16, tl.bfloat16),
        wrong=lambda: torch.tensor([256.0 * 16]),
        reference=lambda: torch.tensor([512.0 * 16]),
        min_error=1000,
    ),
    ValueFault(
        "float16_sum_overflows",
        run=lambda: sum_of(512.0, torch.float16, tl.float16),
        wrong=lambda: torch.tensor([float("inf")]),
        reference=lambda: torch.tensor([512.0 * 512 * 16]),
        min_error=1000,
    ),
    ValueFault(
        "softmax_overflows",
        run=overflowing_softmax,
        wrong=lambda: torch.exp(softmax_inputs()) / torch.exp(softmax_inputs()).sum(1, keepdim=True),
        reference=lambda: torch.softmax(softmax_inputs(), 1),
        min_error=0.1,
    ),
    ValueFault(
        "sum_over_the_wrong_axis",
        run=sums_of_columns,
        wrong=lambda: randn(16, 16).sum(0),
        reference=lambda: randn(16, 16).sum(1),
        min_error=0.1,
    ),
    ValueFault(
        "zeros_where_minus_infinity_belongs",
        run=maxima_of_negatives,
        wrong=lambda: torch.zeros(3),
        reference=lambda: negatives().amax(1),
        min_error=0.5,
    ),
    ValueFault(
        "bytes_wrap_before_the_sum",
        run=wrapping_dot,
        wrong=lambda: torch.mul(*byte_inputs()).sum(0, keepdim=True, dtype=torch.int32),
        reference=lambda: torch.mul(*(x.int() for x in byte_inputs())).sum(0, keepdim=True, dtype=torch.int32),
        min_error=1000,
    ),
]
