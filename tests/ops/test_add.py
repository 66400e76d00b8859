"""Laws of add, for every kernel."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import (
    LAYOUTS,
    assert_compiles,
    assert_gradients_match,
    crossover_at,
    few_examples,
    laid_out,
    layouts,
    shapes,
)
from tilewright.errors import MissingPackage
from tilewright.ops import add as module
from tilewright.runtime import numba as _numba

FORMS = ["eager", "triton", pytest.param("cuda", marks=pytest.mark.gpu), "numba"]
EXTREMES = (1e38, -3e38, float("inf"), -float("inf"), float("nan"), 1e-42, 0.0, -0.0)


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


def same(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("N", [1, 3, 511, 513])
def test_commutes_and_equals_torch_bit_for_bit(form, N, device):
    x, y = (laid_out((N,), "contiguous", device=device, seed=seed) for seed in (0, 1))
    add = module.op.kernels[form].fn
    same(add(x, y), x + y)
    same(add(y, x), add(x, y))
    same(add(x, torch.zeros_like(x)), x)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form, device):
    x = torch.tensor(EXTREMES, device=device).repeat(len(EXTREMES))
    y = torch.tensor(EXTREMES, device=device).repeat_interleave(len(EXTREMES))
    got = module.op.kernels[form].fn(x, y)
    same(got, x + y)
    same(got.signbit() & ~got.isnan(), (x + y).signbit() & ~got.isnan())  # -0.0 stays negative


@pytest.mark.parametrize("form", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("N", [2**13, 2**13 + 1, 2**14 - 3])
def test_even_and_uneven_tiles(form, N, device):
    """Tiles with and without a boundary mask, in aligned and unaligned memory."""
    for layout in ("contiguous", "offset"):
        x, y = (laid_out((N,), layout, device=device, dtype=torch.float16, seed=seed) for seed in (0, 1))
        same(module.add_forward(x, y, form), x + y)


@few_examples
@given(shape=shapes, first=layouts, second=layouts)
def test_any_shape_and_layout(shape, first, second, device, fast_path):
    x = laid_out(shape, first, device=device)
    y = laid_out(shape, second, device=device, seed=1)
    got = tw.add(x, y)
    same(got, x + y)
    assert got.stride() == (x + y).stride()


@few_examples
@given(shape=shapes, dropped=st.integers(0, 2), data=st.data())
def test_broadcasting_matches_torch(shape, dropped, data, device, fast_path):
    """Shapes with the same number of elements can still differ."""
    other = [data.draw(st.sampled_from((1, size))) for size in shape][dropped:]
    x, y = torch.randn(shape, device=device), torch.randn(other, device=device)
    same(tw.add(x, y), x + y)
    same(tw.add(y, x), x + y)
    column = torch.randn(4, 1, device=device)
    same(tw.add(column, column.t()), column + column.t())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, device, fast_path):
    x, y = (laid_out((6, 33), layout, device=device, seed=seed) for seed in (0, 1))
    assert_gradients_match(tw.add, torch.add, x, y)
    assert_gradients_match(lambda x, y: module.add_forward(x, y, "triton"), torch.add, x, y)


def test_double_backward(device, fast_path):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    y = torch.randn(3, 5, device=device, requires_grad=True)
    ours = torch.autograd.grad(tw.add(x * x, y).pow(3).sum(), (x, y), create_graph=True)
    theirs = torch.autograd.grad((x * x + y).pow(3).sum(), (x, y), create_graph=True)
    second = [torch.autograd.grad(sum(g.sum() for g in first), (x, y)) for first in (ours, theirs)]
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_accepts_what_torch_accepts(shape, device, fast_path):
    x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
    same(tw.add(x, y), x + y)
    same(tw.add(x, y, alpha=-0.5), torch.add(x, y, alpha=-0.5))
    same(tw.add(x, 2), x + 2)
    same(tw.add(2, x), 2 + x)
    same(tw.add(x, y.to(torch.float16)), x + y.to(torch.float16))
    same(tw.add(x.int(), y.int(), alpha=3), torch.add(x.int(), y.int(), alpha=3))
    same(tw.add(x.double(), y.double()), x.double() + y.double())
    out = torch.empty_like(x)
    assert tw.add(x, y, out=out) is out
    same(out, x + y)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that both are prototypes
@pytest.mark.parametrize("kind", ["sparse", "csr", "nested"])
def test_sparse_and_nested_tensors_match_torch(kind, device, fast_path):
    x = torch.eye(4, device=device)
    if kind == "nested":
        pair = torch.nested.nested_tensor([x, x])
        same(tw.add(pair, pair).unbind()[0], x + x)
    else:
        pair = x.to_sparse() if kind == "sparse" else x.to_sparse_csr()
        same(tw.add(pair, pair).to_dense(), x + x)


def test_errors_match_torch(device, fast_path):
    x = torch.randn(4, device=device)
    for bad, arguments in (((x, x[:3]), {}), ((x, x), {"alpha": True}), ((x, "one"), {}), (([1.0], x), {})):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            torch.add(*bad, **arguments)
        with pytest.raises(theirs.type) as ours:
            tw.add(*bad, **arguments)
        assert str(ours.value) == str(theirs.value)


def test_autocast_and_functional_transforms_match_torch(device, fast_path):
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.add(x, x).dtype == torch.add(x, x).dtype
    same(torch.func.vmap(tw.add)(x, x), x + x)
    ours = torch.func.jvp(tw.add, (x, x), (x, 2 * x))
    torch.testing.assert_close(ours, torch.func.jvp(torch.add, (x, x), (x, 2 * x)))


def test_missing_numba_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingPackage, match="pip install numba-cuda"):
        _numba.numba_cuda()


def test_small_inputs_go_to_torch(device, monkeypatch):
    monkeypatch.setattr(module, "add_forward", lambda *_: pytest.fail("our kernel was launched"))
    x = torch.randn(8, device=device)
    same(tw.add(x, x), x + x)


def test_registered_operator(device, fast_path):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    y = torch.randn(4, 33, device=device, requires_grad=True)
    torch.library.opcheck(module.add_forward.registered, (x, y, "triton"))
    torch.library.opcheck(module.add_forward.registered, (x.detach().t(), y.detach().t(), "triton"))
    assert_compiles(tw.add, x.detach(), y.detach())
    assert_compiles(lambda x, y: module.add_forward(x, y, "triton"), x.detach(), y.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["triton", "cuda"])
def test_more_than_2_31_elements(form, device):
    N = 2**31 + 9
    x = torch.ones(N, device=device, dtype=torch.float16)
    x[-9:] = torch.arange(9)
    same(module.add_forward(x, x, form)[-20:], 2 * x[-20:])
