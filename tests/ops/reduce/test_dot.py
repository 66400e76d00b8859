"""Laws of the dot product, for every kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from reduction_laws import few_programs as few_programs
from support import (
    LAYOUTS,
    assert_compiles,
    assert_gradients_match,
    assert_right,
    crossover_at,
    few_examples,
    laid_out,
    layouts,
)
from tilewright.ops.reduce import dot as module
from tilewright.runtime import numba as _numba

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
FORMS = ["eager", "triton", CUDA, "numba"]
inf, nan = float("inf"), float("nan")


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


def integers(N: int, *, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return values whose products sum exactly in any order."""
    return torch.randint(-8, 9, (N,), generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_symmetric_linear_and_bounded_by_the_norms(form, device):
    dot = module.op.kernels[form].fn
    x, y, z = (integers(61, device=device, seed=seed) for seed in range(3))
    same(dot(x, y), dot(y, x))
    same(dot(2 * x - z, y), 2 * dot(x, y) - dot(z, y))
    same(dot(x, torch.ones_like(x)), x.sum())
    assert dot(x, y) ** 2 <= dot(x, x) * dot(y, y)  # Cauchy-Schwarz
    same(dot(x, -3 * x) ** 2, dot(x, x) * dot(3 * x, 3 * x))


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("N", [1, 2, 33, 129])
def test_every_element_counts_once(form, N, device):
    x, y = (integers(N, device=device, seed=seed) for seed in (0, 1))
    got = module.dot_forward(x, y, form)
    assert got.shape == ()
    same(got, (x * y).sum())


@pytest.mark.parametrize("form", ["triton", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize(
    ("N", "programs", "rows"),
    [
        (4096, 4224, 1056),
        (20011, 1, 1),  # one part
        (20011, 2, 2),  # parts of several blocks
        (20011, 4224, 1056),  # one part per block
        (8192 * 3, 3, 2),
    ],
)
def test_every_element_counts_once_in_every_split(
    form, dtype, layout, N, programs, rows, device, monkeypatch, few_programs
):
    few_programs(programs, rows)
    monkeypatch.setattr(module, "CUDA_BLOCK", 1024)
    x = laid_out((N,), layout, device=device, dtype=dtype).mul(2).round()
    y = laid_out((N,), "contiguous", device=device, dtype=dtype, seed=1).round()
    same(module.dot_forward(x, y, form), x.double().dot(y.double()).to(dtype))


@pytest.mark.parametrize("form", ["triton", CUDA])
def test_results_are_deterministic(form, device):
    x, y = (laid_out((100003,), "contiguous", device=device, seed=seed) for seed in (0, 1))
    same(module.dot_forward(x, y, form), module.dot_forward(x.clone(), y.clone(), form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        ([inf, 1.0], [1.0, 1.0], inf),
        ([inf, 1.0], [0.0, 1.0], nan),
        ([nan, 1.0], [1.0, 1.0], nan),
        ([3e38, 1.0], [10.0, 1.0], inf),
        ([-inf, inf], [1.0, 1.0], nan),
        ([-0.0, 0.0], [1.0, 1.0], 0.0),
    ],
)
def test_extreme_values(form, x, y, wanted, device):
    got = module.op.kernels[form].fn(torch.tensor(x, device=device), torch.tensor(y, device=device))
    same(got, torch.tensor(wanted, device=device))


def test_half_precision_is_accumulated_in_fp32(device):
    x = torch.ones(60000, device=device, dtype=torch.float16)
    assert module.dot_forward(x, x, "triton").item() == 60000
    assert module.dot_forward(x, 2 * x, "triton").item() == inf
    large = torch.tensor([300.0, 300.0], device=device, dtype=torch.float16)  # its square overflows
    assert module.dot_forward(large, large * large.new_tensor([1, -1]), "triton").item() == 0


@pytest.mark.parametrize("threads", [1, 3, 7, 33])
def test_numba_tree_with_any_number_of_threads(threads, device):
    """The same reduction tree as in ops/include/reduce.cuh."""
    x, y = (integers(50, device=device, seed=seed) for seed in (0, 1))
    partial = torch.empty(1, 2, device=device)
    _numba.launch(module._numba_kernel(), (2,), threads, x, y, partial, 32)
    same(partial, torch.stack([(x * y)[:32].sum(), (x * y)[32:].sum()]).view(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 100, 257, 1000, 1024])
@pytest.mark.parametrize("N", [1, 100, 4099, 100003])
def test_cuda_tree_with_any_number_of_threads(threads, N, device, monkeypatch):
    monkeypatch.setattr(module, "CUDA_THREADS", threads)
    x, y = (integers(N, device=device, seed=seed) for seed in (0, 1))
    same(module.dot_forward(x, y, "cuda"), (x * y).sum())


@pytest.mark.slow
@few_examples
@given(N=st.integers(1, 300), first=layouts, second=layouts)
def test_any_length_and_layout(N, first, second, device, fast_path):
    x = laid_out((N,), first, device=device)
    y = laid_out((N,), second, device=device, seed=1)
    assert_right(tw.dot(x, y), torch.dot, x, y)
    assert_right(module.dot_forward(x, y, "triton"), torch.dot, x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, device, fast_path):
    x, y = (laid_out((33,), layout, device=device, seed=seed) for seed in (0, 1))
    assert_gradients_match(tw.dot, torch.dot, x, y)
    assert_gradients_match(lambda x, y: module.dot_forward(x, y, "triton"), torch.dot, x, y)


@pytest.mark.parametrize("blocks", [0.5, 1, 2, 2.25])
def test_gradients_of_uneven_even_and_several_tiles(blocks, device, fast_path):
    N = int(blocks * module.BACKWARD_BLOCK)
    x, y = (integers(N, device=device, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (0, 1))
    grad = torch.tensor(3.0, device=device, dtype=torch.bfloat16)
    dx, dy = torch.autograd.grad(tw.dot(x, y), (x, y), grad)
    same(dx, 3 * y)
    same(dy, 3 * x)


def test_both_gradients_take_one_launch(device, fast_path, monkeypatch):
    launches = []
    real = module._plan_backward
    monkeypatch.setattr(module, "_plan_backward", lambda *args: launches.append(args) or real(*args))
    x, y = (torch.randn(40, device=device, requires_grad=True) for _ in range(2))
    tw.dot(x, y).backward()
    assert len(launches) == 1


def test_gradient_of_one_input(device, fast_path):
    x = torch.randn(5, device=device, requires_grad=True)
    y = torch.randn(5, device=device)
    same(torch.autograd.grad(tw.dot(x, y), x)[0], y)
    same(torch.autograd.grad(tw.dot(y, x), x)[0], y)


def test_double_backward(device, fast_path):
    x = torch.randn(5, device=device, requires_grad=True)
    y = torch.randn(5, device=device, requires_grad=True)
    ours = torch.autograd.grad(tw.dot(x, y).square(), (x, y), create_graph=True)
    theirs = torch.autograd.grad(torch.dot(x, y).square(), (x, y), create_graph=True)
    second = [torch.autograd.grad(sum(g.square().sum() for g in first), (x, y)) for first in (ours, theirs)]
    torch.testing.assert_close(*second)


def test_accepts_what_torch_accepts(device, fast_path):
    for N in (0, 1, 7):
        x, y = (integers(N, device=device, seed=seed) for seed in (0, 1))
        kinds = [torch.float32, torch.float64, torch.float16, torch.complex64]
        for dtype in kinds if device == "cuda" else [*kinds, torch.int64]:  # torch has no integer dot on a GPU
            same(tw.dot(x.to(dtype), y.to(dtype)), torch.dot(x.to(dtype), y.to(dtype)))
        out = torch.empty((), device=device)
        assert tw.dot(x, y, out=out) is out
        same(out, torch.dot(x, y))


def test_errors_match_torch(device, fast_path):
    x = torch.randn(4, device=device)
    for bad in ((x, x[:3]), (x, x.double()), (x.view(2, 2), x.view(2, 2)), (x[0], x[0]), (x, 1), (1, x)):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            torch.dot(*bad)
        with pytest.raises(theirs.type) as ours:
            tw.dot(*bad)
        assert str(ours.value) == str(theirs.value)


def test_autocast_and_functional_transforms_match_torch(device, fast_path):
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.dot(x[0], y[0]).dtype == torch.dot(x[0], y[0]).dtype
    torch.testing.assert_close(torch.func.vmap(tw.dot)(x, y), (x * y).sum(-1))
    ours = torch.func.jvp(tw.dot, (x[0], y[0]), (x[1], y[1]))
    torch.testing.assert_close(ours, torch.func.jvp(torch.dot, (x[0], y[0]), (x[1], y[1])))


def test_small_inputs_go_to_torch(device, monkeypatch):
    monkeypatch.setattr(module, "dot_forward", lambda *_: pytest.fail("our kernel was launched"))
    x = torch.randn(8, device=device)
    same(tw.dot(x, x), torch.dot(x, x))


def test_registered_operator(device, fast_path):
    x = torch.randn(33, device=device, requires_grad=True)
    y = torch.randn(33, device=device, requires_grad=True)
    torch.library.opcheck(module.dot_forward.registered, (x, y, "triton"))
    torch.library.opcheck(module.dot_forward.registered, (x.detach()[::2], y.detach()[::2], "triton"))
    torch.library.opcheck(module.dot_forward.registered, (x.detach()[:0], y.detach()[:0], "triton"))
    grad = torch.ones((), device=device)
    for wanted in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(module.dot_backward.registered, (x.detach(), y.detach(), grad, wanted))
    assert_compiles(tw.dot, x.detach(), y.detach())
    torch._dynamo.reset()
    (grad,) = torch.autograd.grad(torch.compile(tw.dot, fullgraph=True, backend="aot_eager")(x, y), x)
    same(grad, y.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["triton", "cuda"])
def test_more_than_2_31_elements(form, device):
    x = torch.zeros(2**31 + 9, device=device, dtype=torch.float16)
    x[-9:] = torch.arange(9)
    assert module.dot_forward(x, x, form).item() == 204
