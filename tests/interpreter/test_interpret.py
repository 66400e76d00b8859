"""The context: launches run here while it is open, and Triton is untouched when it is closed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import tilewright
from interpreter import kernels
from tilewright.errors import KernelFault, KernelStopped

ROOT = "tests/interpreter/kernels.py"


@pytest.fixture(autouse=True)
def interpreter():
    """Each test opens the context itself."""


def ptx() -> str:
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    made = ASTSource(kernels._copy, signature, {"BLOCK": 64}, {(0,): [["tt.divisibility", 16]]})
    return triton.compile(made, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def patched() -> list[object]:
    owners = [JITFunction, InterpretedFunction, Autotuner, torch.Tensor, triton.language, triton.language.core]
    owners += [triton.language.math, triton.language.standard, triton.language.tensor, triton.language.dtype, torch]
    return [dict(vars(owner)) for owner in owners]


def test_one_process_interprets_and_compiles_in_either_order():
    x = torch.randn(100)
    before = ptx()
    with tilewright.interpret():
        assert torch.equal(kernels.copy(x), x)
        assert ptx() == before
    kernels._copy.hash = None  # compile afresh
    assert ptx() == before


def test_nothing_stays_patched():
    before = patched()
    with tilewright.interpret():
        kernels.copy(torch.randn(100))
    assert patched() == before
    with pytest.raises(KernelFault), tilewright.interpret():
        kernels.copy_too_much(torch.randn(100))
    assert patched() == before
    with pytest.raises(ZeroDivisionError), tilewright.interpret():
        raise ZeroDivisionError
    assert patched() == before


def test_contexts_nest():
    x = torch.randn(100)
    with tilewright.interpret() as outer:
        with tilewright.interpret() as inner:
            kernels.copy(x)
        kernels.copy(x)
    assert [len(inner.launches), len(outer.launches)] == [1, 1]


def test_a_fault_names_all_there_is_to_know():
    with tilewright.interpret(faults="collect") as run:
        kernels.copy_too_much(torch.randn(100))
    (finding,) = run.findings
    assert (finding.kind, finding.kernel, finding.argument) == ("out of bounds", "_copy_too_much", "x_ptr")
    assert (finding.program, finding.element, finding.lanes) == ((1, 0, 0), (100,), 28)
    line = kernels._copy_too_much.starting_line_number + 3
    assert str(finding) == (
        f"{ROOT}:{line}: out of bounds in _copy_too_much, program (1, 0, 0): "
        "load of element 100 of `x_ptr`, whose elements are 0 to 99 (shape (100,)) (28 lanes)"
    )


def test_the_first_fault_raises_unless_collected():
    with pytest.raises(KernelFault, match="out of bounds"), tilewright.interpret():
        kernels.copy_too_much(torch.randn(100))
    with pytest.raises(ValueError, match="raise"), tilewright.interpret(faults="ignore"):
        pass


@pytest.mark.parametrize(
    ("fn", "says"), [(kernels.assembly, "inline_asm_elementwise"), (kernels.gluon_kernel, "Gluon")]
)
def test_what_cannot_be_interpreted_is_named(fn, says):
    with pytest.raises(KernelStopped, match=says) as stopped, tilewright.interpret():
        fn(torch.randn(64))
    assert stopped.value.kind == "unsupported"
    assert str(stopped.value).startswith(ROOT)
    assert "\n" not in str(stopped.value)


def test_an_endless_loop_ends_at_the_limit():
    with pytest.raises(KernelStopped, match=f"{ROOT}.*after .* operations") as stopped, tilewright.interpret(steps=500):
        kernels.for_ever(torch.zeros(1))
    assert stopped.value.kind == "timeout"


def test_autotuned_kernels_take_their_first_config():
    x = torch.randn(100)
    with tilewright.interpret() as run:
        assert torch.equal(kernels.double(x), 2 * x)
    assert run.launches[0].meta["BLOCK"] == 32
    assert run.launches[0].meta["EVEN"] is False
    assert not kernels._double.cache


def test_memory_that_torch_wrote_counts_as_written():
    with tilewright.interpret(faults="collect") as run:
        kernels.copy(torch.empty(64))
        kernels.copy(torch.empty(64).fill_(1.0))
        kernels.copy(torch.zeros(64))
    assert [bool(launch.findings) for launch in run.launches] == [True, False, False]


def test_writes_behind_the_back_of_torch_count_too():
    behind = torch.empty(64)
    with tilewright.interpret() as run:
        for write in (lambda t: t.data.fill_(1.0), lambda t: t.numpy().fill(1.0), lambda t: t.fill_(-1)):
            behind = torch.empty(64)
            write(behind)
            kernels.copy(behind)
            small = torch.empty(64, dtype=torch.int8)
            kernels.copy(small.fill_(-1))
    assert not run.findings


def test_fresh_memory_is_nan_until_written():
    with tilewright.interpret():
        assert torch.empty(7).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()


def test_threads_take_turns():
    inputs = [torch.randn(5000) for _ in range(8)]
    with tilewright.interpret(), ThreadPoolExecutor(4) as pool:
        for x, y in zip(inputs, pool.map(kernels.copy, inputs), strict=True):
            assert torch.equal(x, y)


def test_callers_may_be_compiled():
    compiled = torch.compile(kernels.copy, backend="eager")
    x = torch.randn(100)
    with tilewright.interpret() as run:
        assert torch.equal(compiled(x), x)
    assert run.launches


def test_what_would_not_compile_or_launch_stops():
    x, y = torch.zeros(64), torch.zeros(64)
    for launch, says in (
        (lambda: kernels._plain_global[(1,)](x), "`PLAIN` is a plain global"),
        (lambda: kernels._copy[(1,)](x, y, 64, BLOCK=64, FOO=3), "no option named 'FOO'"),
        (lambda: kernels._copy[(1, 65536)](x, y, 64, BLOCK=64), "at most"),
        (lambda: kernels._copy[(-1,)](x, y, 64, BLOCK=64), "whole numbers"),
        (lambda: kernels._asserting[(1,)](x, debug=True), "AssertionError: positive"),
    ):
        with pytest.raises(KernelStopped, match=says), tilewright.interpret():
            launch()
    with tilewright.interpret():
        kernels._asserting[(1,)](x)


def test_wrong_arguments_are_one_line():
    with pytest.raises(KernelStopped, match="missing a required argument"), tilewright.interpret():
        kernels._copy[(1,)](torch.randn(4))


def test_an_empty_grid_runs_nothing():
    with tilewright.interpret() as run:
        kernels._copy[(0,)](torch.randn(4), torch.zeros(4), 4, BLOCK=64)
    assert run.launches[0].programs == 0


def test_of_a_large_launch_some_programs_tell_what_all_are_like():
    x, y = torch.randn(2**20), torch.zeros(2**20)
    with tilewright.interpret(lanes=2**14) as run:
        kernels._copy[(1024,)](x, y, len(x), 1024)
    (some,) = run.launches
    assert some.programs == 1024
    assert some.ran == 8
    assert torch.count_nonzero(y) == 8 * 1024
    read, written = some.whole.arguments["x_ptr"], some.whole.arguments["y_ptr"]
    assert (read.loaded, read.distinct_read, written.distinct_written) == (x.nbytes, x.nbytes, y.nbytes)
    assert read.times(2.0).loaded == 2 * x.nbytes
    assert read.times(2.0).distinct_read == x.nbytes, "it has no more"
    with tilewright.interpret(lanes=2**22) as run:
        kernels._copy[(1024,)](x, y, len(x), 1024)
    assert run.launches[0].ran is None
    assert run.launches[0].whole is run.launches[0]
    assert torch.equal(x, y)
