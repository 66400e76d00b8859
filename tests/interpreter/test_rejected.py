"""Kernels that run as Python but that Triton does not compile, or compiles to something else."""

import pytest
import torch
import triton
import triton.language as tl

import tilewright
from tilewright.errors import KernelAborted


@pytest.fixture(autouse=True)
def interpreter():
    """Override the fixture of the suite: each test opens the context itself."""


@triton.jit
def breaks(x, n):
    for i in range(n):
        if i == 3:
            break  # error
        tl.store(x, i)


@triton.jit
def continues(x, n):
    for i in range(n):
        if i == 3:
            continue  # error
        tl.store(x, i)


@triton.jit
def returns_in_a_loop(x, n):
    for i in range(n):
        if i == 3:  # error
            return
        tl.store(x, i)


@triton.jit
def becomes_a_float(x, n):
    total = 0
    for i in range(n):  # error
        total += tl.load(x + i)
    tl.store(x, total)


@triton.jit
def becomes_a_scalar(x, n):
    block = tl.zeros((8,), tl.float32)
    while n > 0:  # error
        block = tl.sum(block, 0)
        n -= 1
    tl.store(x, block)


@triton.jit
def has_two_types(x, n):
    if n > 3:  # noqa: SIM108  error
        value = 1
    else:
        value = 1.5
    tl.store(x, value)


@triton.jit
def is_chosen_from_two_types(x, n):
    value = 1 if n > 3 else 1.5  # error
    tl.store(x, value)


@triton.jit
def is_defined_in_one_branch(x, n):
    if n > 3:
        value = 1.0
    tl.store(x, value)  # error


@triton.jit
def is_defined_in_the_loop(x, n):
    for i in range(n):
        value = i
    tl.store(x, value)  # error


@triton.jit
def one_or_half(n):  # error in later versions of Triton
    if n > 2:
        return 1
    return 0.5  # error


@triton.jit
def calls_a_function_with_two_types(x, n):
    tl.store(x, one_or_half(n))


@triton.jit
def catches(x, n):
    try:  # noqa: SIM105  error
        tl.store(x, n)
    except ValueError:
        pass


@triton.jit
def fills_a_dictionary(x, n):
    table = {"n": n}  # error
    tl.store(x, table["n"])


@triton.jit
def has_a_lambda(x, n):
    increment = lambda value: value + 1  # error
    tl.store(x, increment(n))


@triton.jit
def iterates_over_a_tuple(x, n):
    for value in (1, 2, 3):  # error
        tl.store(x, value)


@triton.jit
def uses_the_loop_variable_afterwards(x, n):
    for i in range(n):
        tl.store(x, i)
    tl.store(x + i, n)  # error


@triton.jit
def overwrites_a_variable_by_the_loop(x, n):
    i = 7
    for i in range(n):
        tl.store(x, i)
    if i > 2 and n > 3:  # error
        tl.store(x, n)


@triton.jit
def loses_an_assignment(x, n):
    following = tl.load(x)
    previous = following
    total = 0.0
    for i in range(n):
        total += previous
        previous = following  # error
        following = tl.load(x + i)
    tl.store(x, total)


def lines_of(kernel) -> list[int]:
    """Return the lines marked `error`, in the kernel or in the function that it calls."""
    marked = one_or_half if kernel is calls_a_function_with_two_types else kernel
    first = marked.starting_line_number + 1
    return [first + number for number, line in enumerate(marked.src.splitlines()) if "error" in line]


KERNELS = {
    breaks: "Break",
    continues: "Continue",
    returns_in_a_loop: "Cannot have `return` statements inside",
    becomes_a_float: "variable total has initial type int32 but is re-assigned to fp32",
    becomes_a_scalar: "variable block has initial type",
    has_two_types: "Mismatched type for value",
    is_chosen_from_two_types: "inconsistent types int32 and fp32",
    is_defined_in_one_branch: "value is not defined",
    is_defined_in_the_loop: "value is not defined",
    calls_a_function_with_two_types: "Inconsistent return types|Return type mismatch",
    catches: "Try",
    fills_a_dictionary: "Dict",
    has_a_lambda: "Lambda",
    iterates_over_a_tuple: "'Tuple' object",
    uses_the_loop_variable_afterwards: "`i` has no value after its loop",
    overwrites_a_variable_by_the_loop: "`i` has no value after its loop",
    loses_an_assignment: "loses this assignment to `previous`",
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_rejected_with_the_line(kernel):
    x = torch.zeros(8)
    with pytest.raises(triton.CompilationError, match=KERNELS[kernel]) as raised, tilewright.interpret():
        kernel[(1,)](x, 6)
    assert isinstance(raised.value, KernelAborted)
    places = [f"test_rejected.py:{line}: {kernel.fn.__name__} fails" for line in lines_of(kernel)]
    assert any(place in str(raised.value) for place in places), str(raised.value)
    assert not x.any()  # a kernel that does not compile writes nothing


@triton.jit
def count_between(x, out):
    value = tl.load(x + tl.arange(0, 8))
    tl.store(out, tl.sum((2 < value <= 5).to(tl.int32)))


def test_chained_comparisons_where_the_compiler_takes_them():
    out = torch.zeros(1, dtype=torch.int32)
    try:
        with tilewright.interpret():
            count_between[(1,)](torch.arange(8), out)
    except triton.CompilationError as error:
        assert "multiple comparison" in str(error)  # noqa: PT017  depends on the version
    else:
        assert out.item() == 3


@triton.jit
def keeps_what_the_loop_counted(x, n, STEPS: tl.constexpr):
    last = 0
    for i in range(n):
        last = i
    for i in tl.static_range(STEPS):
        last += i
    tl.store(x, last * 10 + i)  # a static range leaves the last value


def test_a_static_range_leaves_its_variable():
    x = torch.zeros(1)
    with tilewright.interpret():
        keeps_what_the_loop_counted[(1,)](x, 5, STEPS=3)
    assert x.item() == (4 + 0 + 1 + 2) * 10 + 2


@triton.jit
def prints_when_compiled(x, N: tl.constexpr):
    tl.static_print("N is", N)
    tl.store(x, N)


def test_the_front_end_prints_nothing(capsys):
    with tilewright.interpret():
        prints_when_compiled[(1,)](torch.zeros(1), N=3)
    assert capsys.readouterr().out == "N is 3\n"
