"""Laws of the norms."""

import itertools
import math

import pytest
import torch

import tilewright as tw
from reduction_laws import ReductionLaws, registered, same
from reduction_laws import few_programs as few_programs
from support import assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.ops.reduce import _operators as _reduce
from tilewright.ops.reduce import vector_norm as module

norm = torch.linalg.vector_norm
ORDERS = (0, 0.5, 1, 1.5, 2, 3, math.inf, -math.inf, -1.5)


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


class TestVectorNorm(ReductionLaws):
    module, call, formula, has_dtype = module, tw.vector_norm, norm, False

    def ours(self, x, dim=None, keepdim=False, **more):
        return tw.vector_norm(x, 2, dim, keepdim, **more)

    def expected(self, x, dim=None, keepdim=False):
        return norm(x, 2, dim, keepdim)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order(order, device):
    for shape, dim in (((3, 9001), -1), ((2, 33, 5), 1), ((2, 3, 5), (0, 2))):
        x = laid_out(shape, "contiguous", device=device)
        assert_right(tw.vector_norm(x, order, dim), lambda x, dim=dim: norm(x, order, dim), x)
        assert_gradients_match(
            lambda x, dim=dim: tw.vector_norm(x, order, dim), lambda x, dim=dim: norm(x, order, dim), x
        )


@pytest.mark.parametrize("order", ORDERS)
def test_zeros_and_extreme_values_match_torch(order, device):
    x = torch.tensor([[0.0, 0, 0], [0, 2, -2], [math.inf, 1, 0], [math.nan, 1, 1], [-3, 3, 1]], device=device)
    torch.testing.assert_close(tw.vector_norm(x, order, 1), norm(x, order, 1), equal_nan=True)
    x = x[[0, 1, 4]].requires_grad_()
    first, second = [], []
    for fn in (tw.vector_norm, norm):
        first.append(torch.autograd.grad(fn(x, order, 1).sum(), x, materialize_grads=True))
        (dx,) = torch.autograd.grad(fn(x[1:2].exp(), order, 1).sum(), x, create_graph=True, materialize_grads=True)
        second.append(torch.autograd.grad(dx.sum(), x, materialize_grads=True) if dx.requires_grad else (dx,))
    torch.testing.assert_close(*first, equal_nan=True)
    torch.testing.assert_close(*second, equal_nan=True)


def test_norms_are_monotonic_in_the_order_and_homogeneous(device):
    x = laid_out((5, 200), "contiguous", device=device)
    norms = [tw.vector_norm(x, p, -1) for p in (1, 1.5, 2, 3, math.inf)]
    assert all((a >= b).all() for a, b in itertools.pairwise(norms))
    same(tw.vector_norm(4 * x, 2, -1), 4 * tw.vector_norm(x, 2, -1))


def test_dtype(device):
    x = torch.randn(4, 9, device=device).half()
    torch.testing.assert_close(tw.vector_norm(x, 2, -1, dtype=torch.float32), norm(x, 2, -1, dtype=torch.float32))
    assert tw.vector_norm(x, dtype=torch.float64).dtype == torch.float64


def test_registered_operators(device):
    for kind, p in (("norm2", 2.0), ("normp", 2.5)):
        registered(kind, device, p)
    x, y = torch.randn(4, 33, device=device), torch.randn(33, device=device)
    torch.library.opcheck(_reduce.reduce_forward.registered, (x.t(), [0, 1], True, "norm2", 2.0, torch.float32))
    torch.library.opcheck(_reduce.reduce_forward.registered, (x[:0], [0, 1], False, "norm2", 2.0, None))
    torch.library.opcheck(_reduce.reduce_backward.registered, (x, y, y, y, [0], False, "norminf", 0.0, None))
