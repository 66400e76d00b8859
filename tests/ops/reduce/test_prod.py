"""Laws of the product."""

import pytest
import torch

import tilewright as tw
from reduction_laws import ReductionLaws, registered, same
from reduction_laws import few_programs as few_programs
from support import crossover_at
from tilewright.ops.reduce import prod as module


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


class TestProd(ReductionLaws):
    module, call, formula, dims, has_dtype = module, tw.prod, torch.prod, "one", True

    def values(self, x):
        return 1 + x / 64


def test_is_multiplicative(device):
    x, y = (torch.randint(1, 4, (5, 7), generator=torch.Generator().manual_seed(s)).to(device).float() for s in (0, 1))
    same(tw.prod(x * y, 1), tw.prod(x, 1) * tw.prod(y, 1))
    same(tw.prod(x[:1]), x[:1].prod())


@pytest.mark.parametrize("dim", [0, 1, None])
def test_gradients_with_zeros(dim, device):
    x = torch.tensor([[2.0, 3, 4], [2, 0, 4], [0, 3, 0], [0, 0, 0]], device=device)
    for some in (x, x[1:2], x[:2], x.t()):
        leaf = some.clone().requires_grad_()
        args = () if dim is None else (dim,)
        ours, theirs = (torch.autograd.grad(fn(leaf, *args).sum(), leaf)[0] for fn in (tw.prod, torch.prod))
        same(ours, theirs)
        found = []
        for fn in (tw.prod, torch.prod):
            (dx,) = torch.autograd.grad(fn(leaf, *args).sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), leaf)[0] if dx.requires_grad else dx)
        torch.testing.assert_close(*found)


@pytest.mark.parametrize(("shape", "dim"), [((4, 20001), 1), ((700, 4), 0)], ids=["rows", "columns"])
def test_zeros_are_counted_across_splits(shape, dim, device, few_programs):
    few_programs(64)
    x = torch.ones(shape, device=device)
    rows = x if dim else x.t()
    rows[:, 1::7] = 2.0
    rows[:, 2::7] = 0.5
    rows[1, -1] = 0.0
    rows[2, [0, -1]] = 0.0
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    results = [fn(leaf, dim) for fn, leaf in ((tw.prod, ours), (torch.prod, theirs))]
    same(*results)
    for y in results:
        y.backward(torch.ones_like(y))
    same(ours.grad, theirs.grad)
    rows[3, 300], rows[3, 0] = torch.inf, 0.0
    rows[2, 2:4] = 1e20  # without its zeros the product overflows
    same(tw.prod(x.clone().requires_grad_(), dim), tw.prod(x, dim))
    assert tw.prod(x, dim)[2] == 0


def test_registered_operators(device):
    registered("prod", device)
