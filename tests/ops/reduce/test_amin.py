"""Laws of amin, and of min over a dimension. test_amax.py tests what they share with amax and max."""

import pytest
import torch

import tilewright as tw
from reduction_laws import EXTREMES, ReductionLaws, same
from reduction_laws import few_programs as few_programs
from support import assert_gradients_match, crossover_at, laid_out
from tilewright.ops.reduce import amin as module


class TestAmin(ReductionLaws):
    module, call, formula = module, tw.amin, torch.amin


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_equal_elements_share_the_gradient(dim, device):
    x = laid_out((6, 9), "contiguous", device=device).round()
    args = () if dim is None else (dim,)
    assert_gradients_match(lambda x: tw.amin(x, *args), lambda x: torch.amin(x, *args), x)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_min_over_a_dimension(dim, device):
    for x in (laid_out((3, 700, 2), "contiguous", device=device).round(), torch.tensor(EXTREMES, device=device)):
        ours, theirs = tw.min(x, dim), torch.min(x, dim)
        assert type(ours) is type(theirs)
        same(ours.values, theirs.values)
        same(ours.indices, theirs.indices)
        same(tw.min(x, dim=dim, keepdim=True), torch.min(x, dim=dim, keepdim=True))


def test_gradients_of_min(device):
    x = laid_out((3, 7, 5), "sliced", device=device)
    for dim in (0, 1, 2):
        assert_gradients_match(lambda x, dim=dim: tw.min(x, dim)[0], lambda x, dim=dim: torch.min(x, dim)[0], x)
    x = laid_out((3, 7), "contiguous", device=device).requires_grad_()
    found = []
    for fn in (tw.min, torch.min):
        (dx,) = torch.autograd.grad(fn(x.pow(3), 1)[0].sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.sum(), x))
    torch.testing.assert_close(*found)
