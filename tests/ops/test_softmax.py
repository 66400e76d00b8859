"""Laws of softmax, for every form of it."""

import pytest
import torch
from hypothesis import given

import tilewright as tw
from support import (
    LAYOUTS,
    assert_compiles,
    assert_gradients_match,
    assert_right,
    few_examples,
    laid_out,
    layouts,
    shapes,
)
from tilewright.ops import softmax as module

FORMS = [name for name, kernel in module.op.kernels.items() if kernel.language in ("torch", "triton")]
FORMS.remove("compile")


@pytest.fixture
def fast_path(monkeypatch):
    """The public function takes our kernels however small the input."""
    monkeypatch.setattr(module, "SMALLEST", 0)


@pytest.mark.parametrize("form", FORMS)
def test_rows_sum_to_one_and_shifting_a_row_changes_nothing(form, device):
    x = laid_out((5, 300), "contiguous", device=device)
    y = module.op.kernels[form].fn(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(5, device=device))
    torch.testing.assert_close(module.op.kernels[form].fn(x + 50), y, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form, device):
    inf = float("inf")
    rows = [[1e30, 1e30, 0, 0], [-inf, 0, 1, -inf], [-1e30, -1e30, -1e30, -1e30], [-inf, -inf, -inf, -inf]]
    x = torch.tensor([*rows, [inf, 0, 0, 0], [float("nan"), 0, 0, 0]], device=device)
    torch.testing.assert_close(module.op.kernels[form].fn(x), torch.softmax(x, -1), equal_nan=True)


@few_examples
@given(shape=shapes, layout=layouts)
def test_any_shape_and_layout(shape, layout, device, fast_path):
    x = laid_out(shape, layout, device=device)
    assert_right(tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, device, fast_path):
    x = laid_out((6, 33), layout, device=device)
    assert_gradients_match(lambda x: tw.softmax(x, dim=1), lambda x: torch.softmax(x, 1), x)


def test_gradients_of_gradients(device, fast_path):
    x = laid_out((3, 5), "contiguous", device=device).requires_grad_()
    (ours,) = torch.autograd.grad(tw.softmax(x, -1).square().sum(), x, create_graph=True)
    (theirs,) = torch.autograd.grad(torch.softmax(x, -1).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


def test_rows_too_long_for_registers(device, fast_path):
    x = laid_out((2, module.LONGEST_ROW + 3), "contiguous", device=device)
    assert_right(tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)
    assert_gradients_match(lambda x: tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dim", [-1, 0])
def test_whatever_torch_takes(shape, dim, device, fast_path):
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(tw.softmax(x, dim), torch.softmax(x, dim))


def test_dtype_and_autocast_as_torch(device, fast_path):
    x = torch.randn(4, 8, device=device, dtype=torch.float16)
    assert tw.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.softmax(x, -1).dtype == torch.softmax(x, -1).dtype
    torch.testing.assert_close(tw.softmax(x.double(), -1), torch.softmax(x.double(), -1))


def test_functional_transforms_as_torch(device, fast_path):
    x = torch.randn(4, 8, device=device)
    over_rows = torch.func.vmap(lambda row: tw.softmax(row, -1))
    torch.testing.assert_close(over_rows(x), torch.softmax(x, -1))
    ours = torch.func.jvp(lambda x: tw.softmax(x, -1), (x,), (x,))
    torch.testing.assert_close(ours, torch.func.jvp(lambda x: torch.softmax(x, -1), (x,), (x,)))


def test_registered_operators(device, fast_path):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    torch.library.opcheck(module.softmax_forward, (x, "one-pass"))
    torch.library.opcheck(module.softmax_forward, (x.detach().t(), "online"))
    torch.library.opcheck(module.softmax_backward, (x.detach(), x.detach(), "one-pass"))
    assert_compiles(lambda x: tw.softmax(x, -1), x.detach())
