"""Loads, stores, control flow and constants of the Triton language, and the values they have to store.

The kernels are interpreted on a machine without a GPU and compiled on one with a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.tools.tensor_descriptor import TensorDescriptor

import tilewright
from interpreter.exact import F16, I8, I32, I64, assert_near
from tilewright.errors import KernelAborted


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel that has to store `expected` to its first argument."""

    kernel: Any
    expected: Tensor
    args: tuple[Any, ...]
    grid: tuple[int, ...]

    def check(self, device: str) -> None:
        def to_device(value: Any) -> Any:
            if isinstance(value, TensorDescriptor):
                return TensorDescriptor(
                    value.base.to(device), value.shape, value.strides, value.block_shape, value.padding
                )
            if isinstance(value, tuple):
                return tuple(map(to_device, value))
            return value.clone().to(device) if isinstance(value, Tensor) else value

        out = torch.zeros(self.expected.shape, dtype=self.expected.dtype, device=device)
        self.kernel[self.grid](out, *map(to_device, self.args))
        assert_near(out.cpu(), self.expected)


MEMORY: list[Case] = []
LANGUAGE: list[Case] = []


def stores(cases: list[Case], expected: Any, *args: Any, grid: tuple[int, ...] = (1,)) -> Callable[[Any], Any]:
    """Register a kernel with the values it has to store, int32 unless `expected` is a tensor."""

    def register(kernel: Any) -> Any:
        values = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=I32)
        cases.append(Case(kernel, values, args, grid))
        return kernel

    return register


def parametrize(cases: list[Case]) -> Any:
    function = lambda case: case.kernel if hasattr(case.kernel, "__name__") else case.kernel.fn
    return pytest.mark.parametrize("case", cases, ids=lambda case: function(case).__name__)


@stores(MEMORY, torch.tensor([0, 1, 2, 3, 4, -1, -1, -1, 0, 1, 2, 3, 4, 0, 0, 0.0]), torch.arange(8.0), 5)
@triton.jit
def masked_loads(out, x, n):
    i = tl.arange(0, 8)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=-1))
    tl.store(out + 8 + i, tl.load(x + i, mask=i < n), mask=i < n)


@stores(MEMORY, [3, 0, 7, 0, 5, 6], torch.arange(8, dtype=I32), 7)
@triton.jit
def scalars(out, x, n):
    tl.store(out, tl.load(x + 3))
    tl.store(out + 1, tl.load(x + 4), mask=n < 5)
    tl.store(out + 2, tl.load(x + n, mask=n > 5, other=9))
    end = x + n.to(tl.int64)
    tl.store(out + 4 + tl.arange(0, 2), tl.load(end - 2 + tl.arange(0, 2).to(tl.uint8)))


@stores(MEMORY, [5, 6, 30, 40], torch.tensor([5, 6, 7, 8], dtype=I32), torch.tensor([10, 20, 30, 40], dtype=I32))
@triton.jit
def other_is_a_block(out, x, other):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i, mask=i < 2, other=tl.load(other + i)))


@stores(MEMORY, torch.tensor([False, True, False, True, True, True]), torch.tensor([True, False, True, False]))
@triton.jit
def booleans(out, x):
    i = tl.arange(0, 4)
    tl.store(out + i, ~tl.load(x + i))
    tl.store(out + 4, tl.load(x + 1, mask=tl.load(x + 1), other=True))
    tl.store(out + 5, tl.max(tl.load(x + i).to(tl.int32), 0))


@stores(MEMORY, torch.tensor([1, 1 + 2**-10, 65504, math.inf], dtype=F16), torch.tensor([1, 1.001, 65519, 65520]))
@triton.jit
def stores_convert(out, x):
    tl.store(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)))


@stores(MEMORY, torch.arange(16.0), torch.arange(16.0))
@triton.jit
def cache_policies(out, x):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i, cache_modifier=".cg"), cache_modifier=".wb")
    tl.store(out + 4 + i, tl.load(x + 4 + i, eviction_policy="evict_first"), eviction_policy="evict_last")
    tl.store(out + 8 + i, tl.load(x + 8 + i, cache_modifier=".ca"), cache_modifier=".cs")
    tl.store(out + 12 + i, tl.load(x + 12 + i, cache_modifier=".cv", volatile=True), cache_modifier=".wt")


PADDED = torch.arange(24.0).reshape(4, 6)
WINDOW = torch.full((8, 8), math.nan)
WINDOW[:2, :4] = PADDED[2:, 2:]


if hasattr(TritonSemantic, "make_block_ptr"):  # not in every version of Triton

    @stores(MEMORY, torch.stack([WINDOW, WINDOW.nan_to_num(0), WINDOW.nan_to_num(0).T]), PADDED, 4, 6)
    @triton.jit
    def block_pointers(out, x, rows, columns):
        source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (0, 2), (8, 8), (1, 0))
        source = tl.advance(source, (2, 0))
        target = tl.make_block_ptr(out, (24, 8), (8, 1), (0, 0), (8, 8), (1, 0))
        tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="nan"))
        tl.store(tl.advance(target, (8, 0)), tl.load(source, boundary_check=(0, 1), padding_option="zero"))
        turned = tl.make_block_ptr(x, (columns, rows), (1, columns), (2, 2), (8, 8), (0, 1))
        tl.store(tl.advance(target, (16, 0)), tl.load(turned, boundary_check=(0, 1)), boundary_check=(0,))


TILED = torch.arange(5 * 12.0).reshape(5, 12)


@stores(MEMORY, torch.cat([2 * TILED, TILED]), TILED, 5, 12, grid=(2, 3))
@triton.jit
def descriptors_in_the_kernel(out, x, rows, columns):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [4, 4])
    doubled = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [4, 4])
    added = tl.make_tensor_descriptor(out + rows * columns, [rows, columns], [columns, 1], [4, 4])
    tl.static_assert(source.block_shape[1] == 4)
    start = [tl.program_id(0) * 4, tl.program_id(1) * 4]
    doubled.store(start, 2 * source.load(start))
    added.atomic_add(start, source.load(start))


@stores(MEMORY, torch.arange(64, dtype=I32), torch.arange(32, dtype=I32), torch.arange(32, 64, dtype=I32))
@triton.jit
def descriptors_with_one_and_three_dimensions(out, x, y):
    line = tl.make_tensor_descriptor(x, [32], [1], [16])
    for start in range(0, 32, 16):
        tl.store(out + start + tl.arange(0, 16), line.load([start]))
    cube = tl.make_tensor_descriptor(y, [2, 4, 4], [16, 4, 1], [1, 4, 4])
    for layer in range(2):
        tl.store(out + 32 + layer * 16 + tl.arange(0, 16), tl.ravel(cube.load([layer, 0, 0])))


EDGE = torch.full((4, 8), math.nan)
EDGE[:1, :4] = TILED[4:, 8:]


@stores(MEMORY, EDGE, TensorDescriptor(TILED, [5, 12], [12, 1], [4, 8], "nan"))
@triton.jit
def host_descriptors(out, x):
    tl.static_assert(x.dtype == tl.float32)
    tl.store(out + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :], x.load([4, 8]))


@parametrize(MEMORY)
def test_memory(case, device):
    if device == "cuda":
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=I8, device=device))
    case.check(device)


@triton.jit
def swap_where_equal(memory, expected, before):
    i = tl.arange(0, 32)
    tl.store(before + i, tl.atomic_cas(memory + i, tl.load(expected + i), i + 100))


@triton.jit
def take_once(lock, winners):
    old = tl.atomic_cas(lock, 0, tl.program_id(0) + 1)
    tl.atomic_add(winners, (old == 0).to(tl.int32), sem="relaxed")


def test_compare_and_swap(device):
    memory, before = torch.arange(32, dtype=I32, device=device), torch.zeros(32, dtype=I32, device=device)
    expected = torch.where(torch.arange(32) % 2 == 0, torch.arange(32), 7).int().to(device)
    swap_where_equal[(1,)](memory, expected, before)
    assert before.tolist() == list(range(32))
    assert memory.tolist() == [i + 100 if i % 2 == 0 or i == 7 else i for i in range(32)]
    lock, winners = torch.zeros(1, dtype=I32, device=device), torch.zeros(1, dtype=I32, device=device)
    take_once[(64,)](lock, winners)
    assert winners.item() == 1
    assert 1 <= lock.item() <= 64


@triton.jit
def shuffle_rows(x, order, out, rows, columns):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [1, 16])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [1, 16])
    where = tl.load(order + tl.arange(0, 8))
    target.scatter(source.gather(where, 16), tl.arange(0, 8) + 1, 0)


def test_descriptors_gather_and_scatter():
    """Interpreted only, since Hopper has no instruction for them."""
    x, out = torch.arange(16.0 * 32).reshape(16, 32), torch.zeros(16, 32)
    order = torch.tensor([3, 1, 4, 15, 9, 2, 6, 16], dtype=I32)
    with tilewright.interpret():
        shuffle_rows[(1,)](x, order, out, 16, 32)
    expected = torch.zeros(16, 32)
    expected[1:8, :16] = x[order[:7].long(), 16:]  # row 16 is out of bounds and loads as zero
    assert_near(out, expected)


# Control flow, functions and constants

FACTOR = tl.constexpr(3)


@triton.jit
def scaled(x, factor=FACTOR):
    return x * factor


@triton.jit
def both(x, y: tl.constexpr = 2):
    return x + y, x * y


@triton.jit
def constant():
    return 5


@stores(LANGUAGE, [10, 7, 4, 1, 0, 2, 4, 3, 3], 10, 2**40)
@triton.jit
def ranges(out, n, far):
    k = 0
    for i in range(n, 0, -3):
        tl.static_assert(i.dtype == tl.int32)
        tl.store(out + k, i)
        k += 1
    for i in tl.range(0, n // 2, 2, num_stages=2):
        tl.store(out + k, i)
        k += 1
    for i in range(far, far + 2):
        tl.static_assert(i.dtype == tl.int64)
        tl.store(out + k, 3)
        k += 1


@stores(LANGUAGE, [0, 10, 20, 7, 1, 5])
@triton.jit
def constexprs(out):
    for i in tl.static_range(3):
        tl.store(out + i, i * 10)
    SIZE: tl.constexpr = 2 * FACTOR + 1
    tl.static_assert(SIZE % 2 == 1)
    tl.store(out + 3, SIZE)
    block = tl.zeros((SIZE + 1, 4), tl.float16)
    HALF: tl.constexpr = block.dtype == tl.float16 and block.shape[0] == 8 and block.numel == 32
    if HALF:
        tl.store(out + 4, 1)
    tl.store(out + 5, max(FACTOR, 5) if block.type.is_block() else min(2, 3))


@stores(LANGUAGE, [6, 8, 4, 8, 5, 60], 2, (4, 60))
@triton.jit
def functions_and_tuples(out, x, pair):
    tl.store(out, scaled(x))
    tl.store(out + 1, scaled(x, factor=4))
    total, product = both(x)
    other = both(x, y=4)
    tl.store(out + 2, total * product // 4)
    tl.store(out + 3, other[1])
    five = constant()
    tl.static_assert(five.dtype == tl.int32)
    tl.store(out + 4, five)
    tl.store(out + 5, pair[1])


@stores(LANGUAGE, [111, 55, 9, 4, 1, 1])
@triton.jit
def loops_and_branches(out):
    x, steps = 27, 0
    while tl.condition(x != 1, disable_licm=True):
        if x % 2 == 0:
            x //= 2
        elif x > 0:
            x = 3 * x + 1
        steps += 1
    tl.store(out, steps)
    a, b = 0, 1
    for _ in range(10):
        a, b = b, a + b
    tl.store(out + 1, a)
    y = 3
    y *= y
    tl.store(out + 2, y)
    y -= 5
    tl.store(out + 3, y if y > 3 else -y)
    if (FACTOR and y > 3 and not y > 5) or y < 0:
        tl.store(out + 4, 1)
    tl.store(out + 5, 1 if tl.target_info.cuda_capability_geq(9, 0) else 0)


@stores(LANGUAGE, [0, 1, 3, 6, 0, 15, 21, 28], 4, grid=(8,))
@triton.jit
def programs_diverge(out, skipped):
    pid = tl.program_id(0)
    if pid == skipped:
        return
    total = 0
    for i in range(pid):
        total += i + 1
    tl.store(out + pid, total)


@stores(
    LANGUAGE, [[[100 * x + 10 * y + z + 234000 for x in range(2)] for y in range(3)] for z in range(4)], grid=(2, 3, 4)
)
@triton.jit
def three_dimensional_grid(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(axis=2)
    sizes = tl.num_programs(0) * 100 + tl.num_programs(1) * 10 + tl.num_programs(2)
    tl.store(out + x + 2 * (y + 3 * z), x * 100 + y * 10 + z + sizes * 1000)


@stores(LANGUAGE, [0, 2, 4, 6], None, 4)
@triton.jit
def hints_and_assertions(out, nothing, n):
    i = tl.max_constancy(tl.multiple_of(tl.max_contiguous(tl.arange(0, 4), 4), 4), 1)
    tl.assume(n > 0)
    tl.device_assert(i < 0, "device asserts are off")
    assert n < 0, "asserts are off"
    tl.static_assert(nothing is None, "message")
    if nothing is not None:
        tl.store(out + i, nothing)
    tl.debug_barrier()
    tl.store(out + i, 2 * i, mask=i < n)


@stores(LANGUAGE, [12, 1], 6)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def heuristics(out, n, EVEN: tl.constexpr):
    tl.store(out, n * 2 if EVEN else n)
    tl.store(out + 1, EVEN.value)


@parametrize(LANGUAGE)
def test_language(case, device):
    case.check(device)


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=1) for size in (16, 32)], key=["n"])
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def test_autotuned_kernels_use_their_first_config(device):
    x = torch.arange(100, device=device)
    out = torch.zeros_like(x)
    tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out=out, n=100)
    assert out.tolist() == x.tolist()
    with tilewright.interpret() as run:
        tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x.cpu(), out=torch.empty(100, dtype=I64), n=100)
    assert run.launches[0].meta["BLOCK"] == 16


@triton.jit
def show(x):
    tl.device_print("seen", tl.load(x + tl.program_id(0)))


def test_device_print(device, capfd):
    show[(2,)](torch.tensor([17, 42], device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    shown = capfd.readouterr().out
    assert re.search(r"^pid \(0, 0, 0\).* seen: 17$", shown, re.MULTILINE)
    assert re.search(r"^pid \(1, 0, 0\).* seen: 42$", shown, re.MULTILINE)


@triton.jit
def assembly(x):
    v = tl.load(x + tl.arange(0, 32))
    tl.store(x + tl.arange(0, 32), tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], tl.int32, True, 1))


def test_unsupported_features_are_named():
    with tilewright.interpret(), pytest.raises(KernelAborted) as aborted:
        assembly[(1,)](torch.zeros(32, dtype=I32))
    assert aborted.value.kind == "unsupported"
    named = r"\S*test_language.py:\d+: assembly uses tl.inline_asm_elementwise, .*"
    assert re.fullmatch(named, str(aborted.value))
