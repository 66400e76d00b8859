"""Laws of argmax."""

import pytest
import torch

import tilewright as tw
from reduction_laws import FLOATS, ReductionLaws, same
from reduction_laws import few_programs as few_programs
from support import crossover_at, laid_out
from tilewright.ops.reduce import _operators as _reduce
from tilewright.ops.reduce import _plans
from tilewright.ops.reduce import argmax as module
from tilewright.ops.reduce._operators import Reduce


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


class TestArgmax(ReductionLaws):
    module, call, formula, dims, has_gradients = module, tw.argmax, torch.argmax, "one", False


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("programs", [2, 4224])
def test_first_of_equal_elements(dtype, programs, device, few_programs):
    few_programs(programs)
    for N in (7, 1100):
        x = torch.zeros(3, N, device=device, dtype=dtype)
        same(tw.argmax(x, -1), torch.zeros(3, dtype=torch.int64, device=device))
        same(tw.argmax(x - torch.inf, -1), torch.zeros(3, dtype=torch.int64, device=device))
        x[0, -1], x[1, N // 2 :], x[2, N // 3], x[2, -1] = 1, 1, torch.nan, torch.nan
        same(tw.argmax(x, -1), torch.tensor([N - 1, N // 2, N // 3], device=device))
        same(tw.argmax(x.t().contiguous(), 0), torch.tensor([N - 1, N // 2, N // 3], device=device))


def test_partial_sums_of_a_row_beyond_int32(device):
    z = torch.empty(1, dtype=torch.int64, device=device)
    put_together = _plans._combine(1, 2**32, 4, 2**30, _plans.KINDS["argmax"], 0.0, z.get_device())
    places = torch.tensor([3, 1, 2, 0], device=device)
    for largest, place in (([1.0, 4.0, 2.0, 4.0], 2**30 + 1), ([1.0, 4.0, 2.0, 5.0], 3 * 2**30)):
        put_together(torch.tensor(largest, device=device), places, None, z, z, None)
        assert z.item() == place


def test_index_of_the_largest_element(device):
    x = laid_out((5, 700), "contiguous", device=device)
    same(x.gather(1, tw.argmax(x, 1, keepdim=True)), x.amax(1, keepdim=True))
    same(tw.argmax(x), x.flatten().argmax())
    same(tw.argmax(x.t()), x.t().flatten().argmax())
    same(tw.argmax(x, keepdim=True), torch.argmax(x, keepdim=True))


def test_registered_operator(device):
    x = torch.randn(4, 33, device=device)
    torch.library.opcheck(_reduce.reduce_index.registered, (x, *Reduce((1,), False, "argmax")))
    torch.library.opcheck(_reduce.reduce_index.registered, (x.t(), *Reduce((0, 1), True, "argmax")))
