"""Laws of the masked softmax."""

import pytest
import torch

import tilewright as tw
from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, laid_out
from tilewright.ops.softmax import masked_softmax as module


def some_mask(*shape: int, device: str) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3).to(device)


def test_without_a_mask_it_is_softmax(device):
    x = laid_out((2, 3, 5, 70), "contiguous", device=device)
    torch.testing.assert_close(tw.masked_softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(tw.masked_softmax(x, scale=0.5), torch.softmax(x * 0.5, -1))


def test_masked_scores_are_zero_and_visible_ones_sum_to_one(device):
    x = laid_out((2, 3, 9, 9), "contiguous", device=device)
    mask = some_mask(2, 1, 1, 9, device=device)
    mask[..., 0] = True
    y = tw.masked_softmax(x, mask, is_causal=True)
    seen = mask & torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    assert (y.masked_select(~seen.expand_as(y)) == 0).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(2, 3, 9, device=device))


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), -float("inf")])
def test_masked_scores_are_not_read(hidden, device):
    x = laid_out((4, 4), "contiguous", device=device)
    poisoned = x.masked_fill(torch.ones(4, 4, dtype=torch.bool, device=device).triu(1), hidden)
    torch.testing.assert_close(tw.masked_softmax(poisoned, is_causal=True), tw.masked_softmax(x, is_causal=True))


def test_fully_masked_row_is_zero_and_so_is_its_gradient(device):
    x = laid_out((1, 1, 3, 8), "contiguous", device=device).requires_grad_()
    mask = torch.tensor([True, False, True], device=device)[:, None]
    y = tw.masked_softmax(x, mask)
    assert (y[0, 0, 1] == 0).all()
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert (dx[0, 0, 1] == 0).all()
    assert dx.isfinite().all()


def test_masked_scores_have_no_gradient(device):
    x = laid_out((1, 1, 1, 4), "contiguous", device=device)
    x[..., 0] = float("nan")
    x.requires_grad_()
    mask = torch.tensor([True, True, False, False], device=device)
    (dx,) = torch.autograd.grad(tw.masked_softmax(x, mask).sum(), x)
    assert dx[..., :2].isnan().all()
    assert (dx[..., 2:] == 0).all()


SHAPES = [(6, 33), (2, 6, 33), (2, 3, 6, 33)]
MASKS = [None, (33,), (6, 1), (6, 33), (2, 1, 33), (2, 1, 6, 33), (2, 3, 1, 1)]


@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [(s, m) for s in SHAPES for m in MASKS if m is None or (len(m) <= len(s) and (len(m) != 3 or len(s) == 3))],
)
def test_any_mask_that_broadcasts(shape, mask_shape, device):
    x = laid_out(shape, "contiguous", device=device)
    mask = some_mask(*mask_shape, device=device) if mask_shape else None
    for causal in (False, True):
        got = tw.masked_softmax(x, mask, scale=0.3, is_causal=causal)
        assert_right(got, lambda x, c=causal: module.reference(x, mask, 0.3, c), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, device):
    x = laid_out((2, 3, 6, 33), layout, device=device)
    mask = some_mask(2, 1, 6, 33, device=device)
    ours, reference = (
        lambda x: tw.masked_softmax(x, mask, scale=0.3, is_causal=True),
        lambda x: module.reference(x, mask, 0.3, True),
    )
    assert_gradients_match(ours, reference, x)


def test_double_backward(device):
    x = laid_out((2, 5, 5), "contiguous", device=device).requires_grad_()
    (ours,) = torch.autograd.grad(tw.masked_softmax(x, scale=0.5, is_causal=True).square().sum(), x, create_graph=True)
    reference = module.reference(x, None, 0.5, True)
    (theirs,) = torch.autograd.grad(reference.square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


def test_rows_too_long_for_registers(device):
    x = laid_out((1, 1, 2, 33000), "contiguous", device=device)
    mask = some_mask(33000, device=device)
    assert_right(tw.masked_softmax(x, mask), lambda x: module.reference(x, mask, 1.0, False), x)


def test_ineligible_inputs_use_the_reference(device):
    x = torch.randn(2, 2, 2, 3, 5, device=device)
    torch.testing.assert_close(tw.masked_softmax(x, is_causal=True), module.reference(x, None, 1.0, True))
    torch.testing.assert_close(tw.masked_softmax(x.double()), torch.softmax(x.double(), -1))
    assert tw.masked_softmax(torch.empty(0, 4, 4, device=device)).shape == (0, 4, 4)


def test_errors_are_one_line(device):
    x = torch.randn(3, 4, device=device)
    for bad, error in (((x[0],), ValueError), ((x, x), TypeError), ((x, some_mask(5, device=device)), RuntimeError)):
        with pytest.raises(error) as said:
            tw.masked_softmax(*bad)
        assert "\n" not in str(said.value)
    with pytest.raises(ValueError, match="does not broadcast"):
        tw.masked_softmax(x, some_mask(2, 3, 4, device=device))


def test_registered_operator(device):
    x = torch.randn(2, 3, 4, 33, device=device, requires_grad=True)
    mask = some_mask(2, 1, 1, 33, device=device)
    torch.library.opcheck(module.masked_softmax_forward.registered, (x, mask, 0.5, True))
    torch.library.opcheck(module.masked_softmax_forward.registered, (x.detach(), None, 1.0, False))
    assert_compiles(lambda x: tw.masked_softmax(x, is_causal=True), x.detach())
