"""Cheap launches use the machine code that a plain Triton launch would use, found by a cheaper key."""

from types import SimpleNamespace

import numpy
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher

from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.interpreter import interpret
from tilewright.ops.reduce._operators import reduce
from tilewright.runtime.launch import Launcher, _Compiled, _specialization
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Case
from tilewright.workbench.inspect.launches import kernel_launches


@triton.jit
def _scale(x_ptr, y_ptr, N, by, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < N) * by, mask=offs < N)


@triton.jit
def _scale_and_move(x_ptr, b_ptr, y_ptr, N, by, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + offs, mask=offs < N) * by
    if b_ptr is not None:
        y += tl.load(b_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, y, mask=offs < N)


def test_a_prepared_launch_refuses_other_kinds_of_tensors():
    """On a GPU, the kernel compiled for the first call would take them for what those were."""
    x, y, bias = torch.randn(3, 100).unbind()
    prepared = Launcher(_scale_and_move).prepare((4,), 100, 2.0, BLOCK=32)
    with interpret():
        prepared(x, None, y)
        for others in ((bias, y), (None, y.half())):
            with pytest.raises(AssertionError, match="a launch of _scale_and_move was prepared for"):
                prepared(x, *others)


def test_interpreted_launches_go_through_triton():
    x, y = torch.randn(100), torch.empty(100)
    with interpret():
        Launcher(_scale)((4,), x, y, 100, 3.0, BLOCK=32)
        torch.testing.assert_close(y, 3 * x)
        Launcher(_scale).prepare((4,), 100, 2.0, BLOCK=32)(x, y)
    torch.testing.assert_close(y, 2 * x)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_prepared_launch_with_an_optional_tensor(offset, device):
    x, b, y = (torch.randn(100 + offset, device=device)[offset:] for _ in range(3))
    launcher = Launcher(_scale_and_move)
    for moved in (None, b):
        prepared = launcher.prepare((4,), 100, 2.0, BLOCK=32)
        for _ in range(2):
            prepared(x, moved, y.zero_())
            torch.testing.assert_close(y, 2 * x if moved is None else 2 * x + moved)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 16, 100, 4096])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cached_specializations_are_right(N, offset, dtype):
    launcher = Launcher(_scale)
    prepared = launcher.prepare((cdiv(N, 64),), N, 3.0, BLOCK=64)
    for _ in range(3):
        x = torch.randn(N + offset, device="cuda", dtype=dtype)[offset:]
        launches = (
            lambda y, x=x: launcher((cdiv(N, 64),), x, y, N, 3.0, BLOCK=64),
            lambda y, x=x: prepared(x, y),
        )
        for launch in launches:
            y = torch.full((N,), 7.0, device="cuda", dtype=dtype)
            launch(y)
            torch.testing.assert_close(y, 3 * x)


@pytest.mark.gpu
def test_launches_run_on_the_current_stream():
    x, y = torch.ones(2**24, device="cuda"), torch.zeros(2**24, device="cuda")
    stream = torch.cuda.Stream()
    launcher = Launcher(_scale)
    launcher((1,), x, y, 1, 1.0, BLOCK=1024)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            launcher((2**14,), x, x, 2**24, 1.0, BLOCK=1024)
        launcher((2**14,), x, y, 2**24, 3.0, BLOCK=1024)
    stream.synchronize()
    assert (y == 3).all()


@pytest.mark.gpu
def test_launches_can_be_captured_in_a_graph():
    x, y = torch.ones(4096, device="cuda"), torch.zeros(4096, device="cuda")
    launcher = Launcher(_scale)
    launcher((4,), x, y, 4096, 2.0, BLOCK=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher((4,), x, y, 4096, 2.0, BLOCK=1024)
    x.fill_(5)
    graph.replay()
    assert (y == 10).all()


@pytest.mark.gpu
def test_a_dependent_launch_reads_what_the_first_kernel_wrote():
    """With different values each time, and in a CUDA graph."""
    x = torch.zeros(2**24, device="cuda")
    total = lambda: reduce(x, (0,), False, "sum")
    assert total() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = total()
    for n in range(1, 50):
        x.fill_(n)
        assert total() == n * 2**24
        graph.replay()
        assert captured == n * 2**24


def test_the_direct_launch_passes_the_same_arguments_as_tritons_launcher():
    """Triton's launcher is used if the kernel needs scratch memory."""
    launched = []
    run = object.__new__(CudaLauncher)
    run.launch = lambda *args: launched.append(args)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    made = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))
    short = _Compiled(made, _scale)
    short.run(3, 2, 1, 99, *short.before, 11, 12, *short.constants)
    run(3, 2, 1, 99, 7, (4, 1, 0), None, None, None, 11, 12, *short.constants)
    assert launched[0] == launched[1]
    assert short.run is run.launch
    run.global_scratch_size = 64
    assert _Compiled(made, _scale).run is run


@pytest.mark.parametrize(("gpu", "can"), [("h200", True), ("b200", True), ("a100", False), ("mi300x", False)])
@pytest.mark.parametrize(
    ("name", "point", "direction"),
    [
        ("sum", {"M": 1, "N": 2**24}, "forward"),
        (
            "var",
            {"M": 1, "N": 2**28},
            "forward",
        ),  # the second of three launches does both
        ("bias_activation", {"M": 4096, "N": 1024, "act": "silu"}, "backward"),
    ],
)
def test_dependent_launches_are_used_on_gpus_that_have_them(name, point, direction, gpu, can):
    op = registry.load(name)
    case = Case(tuple(point.items()), "bfloat16")
    launches = [one.code for one in kernel_launches(op, op.kernels["triton"], case, datasheet(gpu), (direction,))]
    assert len(launches) == (3 if name == "var" else 2)

    def constant(code, name):
        return code.constants[([*code.signature].index(name),)]

    assert all(constant(code, "PDL") is can for code in launches[:-1])
    assert all(constant(code, "WAITS") is can for code in launches[1:])
    assert [code.options.get("launch_pdl", False) for code in launches] == [False, *[can] * (len(launches) - 1)]


def test_numbers_of_any_type_are_specialized_as_numbers():
    assert _specialization(numpy.float64(1e-5)) is numpy.float64
    assert _specialization(16) == (False, True, False)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_calls_of_one_shape_and_other_kinds_have_plans_of_their_own(dtypes):
    """A GPU would run the kernel that was compiled for the first call."""
    matmul, gated = registry.load("matmul").kernels["triton-persistent"].fn, registry.load("gated_linear")
    with interpret():
        for dtype in dtypes:
            a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
            torch.testing.assert_close(matmul(a, b), a @ b)
            for needs_grad in (True, False):
                args = (a.clone().requires_grad_(needs_grad), b, b, "silu")
                torch.testing.assert_close(
                    gated.kernels["triton"].fn(*args), gated.reference(*args), rtol=0.02, atol=0.5
                )
