"""Laws of log_softmax. Its kernels are those of softmax, whose tests cover them too."""

import pytest
import torch
from hypothesis import given

import tilewright as tw
from support import (
    LAYOUTS,
    assert_compiles,
    assert_gradients_match,
    assert_right,
    crossover_at,
    few_examples,
    laid_out,
    layouts,
    shapes,
)
from tilewright.ops.softmax import _operators as _softmax
from tilewright.ops.softmax import log_softmax as module

FORMS = ["eager", "triton-online", "triton"]


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.parametrize("form", FORMS)
def test_exponentials_sum_to_one_and_shifts_are_neutral(form, device):
    x = laid_out((5, 300), "contiguous", device=device)
    y = module.op.kernels[form].fn(x)
    torch.testing.assert_close(y.exp().sum(-1), torch.ones(5, device=device))
    torch.testing.assert_close(module.op.kernels[form].fn(x + 50), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form, device):
    inf = float("inf")
    rows = [[1e30, 1e30, 0, 0], [-inf, 0, 1, -inf], [-1e30, -1e30, -1e30, -1e30], [-inf, -inf, -inf, -inf]]
    x = torch.tensor([*rows, [inf, 0, 0, 0], [float("nan"), 0, 0, 0]], device=device)
    torch.testing.assert_close(module.op.kernels[form].fn(x), torch.log_softmax(x, -1), equal_nan=True)


@few_examples
@given(shape=shapes, layout=layouts)
def test_any_shape_and_layout(shape, layout, device, fast_path):
    x = laid_out(shape, layout, device=device)
    for dim in (-1, 0):
        assert_right(tw.log_softmax(x, dim), lambda x, dim=dim: torch.log_softmax(x, dim), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients(layout, dim, device, fast_path):
    x = laid_out((6, 33), layout, device=device)
    assert_gradients_match(lambda x: tw.log_softmax(x, dim), lambda x: torch.log_softmax(x, dim), x)


def test_double_backward(device, fast_path):
    x = laid_out((3, 5), "contiguous", device=device).requires_grad_()
    (ours,) = torch.autograd.grad(tw.log_softmax(x, -1).square().sum(), x, create_graph=True)
    (theirs,) = torch.autograd.grad(torch.log_softmax(x, -1).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


def test_rows_too_long_for_registers(device, fast_path):
    x = laid_out((2, _softmax.MAX_TILE + 3), "contiguous", device=device)
    assert_right(tw.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1), x)
    assert_gradients_match(lambda x: tw.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1), x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dim", [-1, 0])
def test_accepts_what_torch_accepts(shape, dim, device, fast_path):
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(tw.log_softmax(x, dim), torch.log_softmax(x, dim))


def test_errors_dtype_and_autocast_match_torch(device, fast_path):
    x = torch.randn(4, 8, device=device, dtype=torch.float16)
    assert tw.log_softmax(x, -1, dtype=torch.float32).dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.log_softmax(x, -1).dtype == torch.log_softmax(x, -1).dtype
    with pytest.raises(IndexError) as theirs:
        torch.log_softmax(x, 2)
    with pytest.raises(IndexError) as ours:
        tw.log_softmax(x, 2)
    assert str(ours.value) == str(theirs.value)


def test_compiles(device, fast_path):
    assert_compiles(lambda x: tw.log_softmax(x, -1), torch.randn(4, 33, device=device))
