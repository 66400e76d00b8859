"""The `interpret` context: launches run on the CPU while it is open, and Triton is unchanged once it is closed."""

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
from tilewright.errors import KernelAborted, KernelFault

ROOT = "tests/interpreter/kernels.py"


@pytest.fixture(autouse=True)
def interpreter():
    """Override the fixture of the suite: each test opens the context itself."""


def ptx() -> str:
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    made = ASTSource(kernels._copy, signature, {"BLOCK": 64}, {(0,): [["tt.divisibility", 16]]})
    return triton.compile(made, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def patched() -> list[object]:
    owners = [JITFunction, InterpretedFunction, Autotuner, torch.Tensor, triton.language, triton.language.core]
    owners += [triton.language.math, triton.language.standard, triton.language.tensor, triton.language.dtype, torch]
    return [dict(vars(owner)) for owner in owners]


def test_one_process_can_interpret_and_compile():
    x = torch.randn(100)
    before = ptx()
    with tilewright.interpret():
        assert torch.equal(kernels.copy(x), x)
        assert ptx() == before
    kernels._copy.hash = None  # forces a recompilation
    assert ptx() == before


def test_closing_the_context_removes_all_patches():
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


def test_a_finding_names_line_program_element_and_lanes():
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


def test_a_fault_raises_unless_collected():
    with pytest.raises(KernelFault, match="out of bounds"), tilewright.interpret():
        kernels.copy_too_much(torch.randn(100))
    with pytest.raises(ValueError, match="raise"), tilewright.interpret(faults="ignore"):
        pass


def test_unsupported_features_are_named():
    with pytest.raises(KernelAborted, match="inline_asm_elementwise") as aborted, tilewright.interpret():
        kernels.assembly(torch.randn(64))
    assert aborted.value.kind == "unsupported"
    assert str(aborted.value).startswith(ROOT)
    assert "\n" not in str(aborted.value)


def test_an_endless_loop_stops_at_the_step_limit():
    with pytest.raises(KernelAborted, match=f"{ROOT}.*after .* operations") as aborted, tilewright.interpret(steps=500):
        kernels.endless_loop(torch.zeros(1))
    assert aborted.value.kind == "timeout"


def test_autotuned_kernels_use_their_first_config():
    x = torch.randn(100)
    with tilewright.interpret() as run:
        assert torch.equal(kernels.double(x), 2 * x)
    assert run.launches[0].meta["BLOCK"] == 32
    assert run.launches[0].meta["EVEN"] is False
    assert not kernels._double.cache


def test_memory_written_by_torch_counts_as_initialized():
    with tilewright.interpret(faults="collect") as run:
        kernels.copy(torch.empty(64))
        kernels.copy(torch.empty(64).fill_(1.0))
        kernels.copy(torch.zeros(64))
    assert [bool(launch.findings) for launch in run.launches] == [True, False, False]


def test_writes_that_bypass_the_version_counter_count_as_initialized():
    with tilewright.interpret() as run:
        for write in (lambda t: t.data.fill_(1.0), lambda t: t.numpy().fill(1.0), lambda t: t.fill_(-1)):
            written = torch.empty(64)
            write(written)
            kernels.copy(written)
            small = torch.empty(64, dtype=torch.int8)
            kernels.copy(small.fill_(-1))
    assert not run.findings


def test_uninitialized_memory_is_nan():
    with tilewright.interpret():
        assert torch.empty(7).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()


def test_launches_from_several_threads():
    inputs = [torch.randn(5000) for _ in range(8)]
    with tilewright.interpret(), ThreadPoolExecutor(4) as pool:
        for x, y in zip(inputs, pool.map(kernels.copy, inputs), strict=True):
            assert torch.equal(x, y)


def test_launches_from_a_compiled_function():
    compiled = torch.compile(kernels.copy, backend="eager")
    x = torch.randn(100)
    with tilewright.interpret() as run:
        assert torch.equal(compiled(x), x)
    assert run.launches


def test_kernels_that_triton_would_reject_abort():
    x, y = torch.zeros(64), torch.zeros(64)
    for launch, message in (
        (lambda: kernels._plain_global[(1,)](x), "`PLAIN` is a plain global"),
        (lambda: kernels._copy[(1,)](x, y, 64, BLOCK=64, FOO=3), "no Triton launch option is named 'FOO'"),
        (lambda: kernels._copy[(1, 65536)](x, y, 64, BLOCK=64), "at most"),
        (lambda: kernels._copy[(-1,)](x, y, 64, BLOCK=64), "non-negative integers"),
        (lambda: kernels._asserting[(1,)](x, debug=True), "tl.device_assert: positive"),
    ):
        with pytest.raises(KernelAborted, match=message), tilewright.interpret():
            launch()
    with tilewright.interpret():
        kernels._asserting[(1,)](x)


def test_missing_arguments_abort():
    with pytest.raises(KernelAborted, match="missing a required argument"), tilewright.interpret():
        kernels._copy[(1,)](torch.randn(4))


def test_an_empty_grid_runs_no_program():
    with tilewright.interpret() as run:
        kernels._copy[(0,)](torch.randn(4), torch.zeros(4), 4, BLOCK=64)
    assert run.launches[0].programs == 0


def test_an_empty_tensor_is_accessed_with_all_lanes_masked():
    with tilewright.interpret() as run:
        kernels._copy[(1,)](torch.zeros(0), torch.zeros(0), 0, BLOCK=64)
    assert [t.masked for t in run.launches[0].arguments.values()] == [64, 64]


def test_a_sample_of_the_programs_is_extrapolated_to_the_grid():
    x, y = torch.randn(2**20), torch.zeros(2**20)
    with tilewright.interpret(lanes=2**14) as run:
        kernels._copy[(1024,)](x, y, len(x), 1024)
    (sampled,) = run.launches
    assert sampled.programs == 1024
    assert sampled.programs_run == 8
    assert torch.count_nonzero(y) == 8 * 1024
    read, written = (sampled.extrapolated.arguments[name] for name in ("x_ptr", "y_ptr"))
    assert (read.loaded, read.distinct_read, written.distinct_written) == (x.nbytes, x.nbytes, y.nbytes)
    assert read.scaled(2.0).loaded == 2 * x.nbytes
    assert read.scaled(2.0).distinct_read == x.nbytes, "no more than the tensor has"
    with tilewright.interpret(lanes=2**22) as run:
        kernels._copy[(1024,)](x, y, len(x), 1024)
    assert run.launches[0].programs_run is None
    assert run.launches[0].extrapolated is run.launches[0]
    assert torch.equal(x, y)


def test_a_device_as_a_context_applies_inside():
    with torch.device("meta"), tilewright.interpret():
        assert torch.empty(3).is_meta
    with tilewright.interpret(), torch.device("meta"):
        assert torch.empty(3).is_meta
    with torch.device("meta"):
        assert torch.empty(3).is_meta
