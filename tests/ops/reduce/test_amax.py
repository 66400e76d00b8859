"""Laws of amax, and of max over a dimension."""

import pytest
import torch

import tilewright as tw
from reduction_laws import ExtremumLaws, registered, same
from reduction_laws import few_programs as few_programs
from support import assert_compiles, crossover_at
from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.ops.reduce import _operators as _reduce
from tilewright.ops.reduce import amax as module
from tilewright.ops.reduce._operators import Reduce
from tilewright.spec import Case
from tilewright.workbench.inspect.launches import kernel_launches

WAYS = ("forward", "backward")


class TestAmax(ExtremumLaws):
    module, call, formula = module, tw.amax, torch.amax
    with_index, formula_with_index = tw.max, torch.max


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.parametrize("shape", [(6, 9), (2, 20001), (700, 3)], ids=["tile", "pieces", "columns"])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_equal_to_the_padding_share_the_gradient_among_themselves(shape, dim, device):
    x = torch.full(shape, -torch.inf, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(tw.amax(x, dim).sum(), x)
    torch.testing.assert_close(dx, torch.full_like(dx, 1 / shape[dim]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ["amax", "amin", "prod", "var", "logsumexp"])
@pytest.mark.parametrize("M", [1, 4096])
def test_backward_reads_the_input_once(op, M):
    op = registry.load(op)
    found = kernel_launches(
        op, op.kernels["triton"], Case((("M", M), ("N", 65536)), "bfloat16"), datasheet("h200"), WAYS
    )
    assert [one.name for one in found if one.direction == "backward"] == ["_reduce_bwd"]


def test_every_overload_of_max(device):
    x, y = torch.randn(2, 4, 5, device=device)
    same(tw.max(x), torch.max(x))
    same(tw.max(x, y), torch.max(x, y))
    same(tw.max(x, other=y), torch.max(x, other=y))
    same(tw.max(x.int(), 1), torch.max(x.int(), 1))
    for bad in ((x, 2), (x, 0.5), (x, "a"), (x, 0, 1, 2), (x[:0], 0), (1,)):
        with pytest.raises((RuntimeError, TypeError, IndexError)) as theirs:
            torch.max(*bad)
        with pytest.raises(theirs.type):
            tw.max(*bad)


def test_registered_operators(device):
    registered("amax", device)
    x = torch.randn(4, 33, device=device)
    torch.library.opcheck(
        _reduce.reduce_with_index.registered, (x.clone().requires_grad_(), *Reduce((1,), False, "max"))
    )
    torch.library.opcheck(_reduce.reduce_with_index.registered, (x.t(), *Reduce((0,), True, "max")))
    assert_compiles(lambda x: tuple(tw.max(x, 1)), x)


def test_errors_of_max_match_torch(device):
    x = torch.randn(2, 3, device=device)
    for call in (lambda f: f(x, 0, dim=1), lambda f: f(x, dim=9), lambda f: f(x, 0, False, 1)):
        with pytest.raises((TypeError, IndexError)) as theirs:
            call(torch.max)
        with pytest.raises(type(theirs.value)) as ours:
            call(tw.max)
        assert str(ours.value) == str(theirs.value)
