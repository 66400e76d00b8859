"""Laws of log_softmax. Its kernels are those of softmax, whose tests cover them too."""

import pytest
import torch
from hypothesis import given

import tilewright as tw
from softmax_laws import SoftmaxLaws
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
from tilewright.ops.softmax import log_softmax as module

FORMS = ["eager", "triton-online", "triton"]


class TestLogSoftmax(SoftmaxLaws):
    module, call, formula = module, tw.log_softmax, torch.log_softmax


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


def test_compiles(device, fast_path):
    assert_compiles(lambda x: tw.log_softmax(x, -1), torch.randn(4, 33, device=device))
