"""Laws of argmin."""

import pytest
import torch

import tilewright as tw
from reduction_laws import ReductionLaws, same
from reduction_laws import few_programs as few_programs
from support import crossover_at, laid_out
from tilewright.ops.reduce import argmin as module


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


class TestArgmin(ReductionLaws):
    module, call, formula, dims, has_gradients = module, tw.argmin, torch.argmin, "one", False


def test_equals_argmax_of_the_negative_and_takes_the_first_of_equals(device):
    x = laid_out((5, 700), "contiguous", device=device).mul(2).round()
    for dim in (None, 0, 1):
        same(tw.argmin(x, dim), tw.argmax(-x, dim))
        same(tw.argmin(x, dim), torch.argmin(x, dim))
    same(tw.argmin(torch.full((3, 9), torch.inf, device=device), 1), torch.zeros(3, dtype=torch.int64, device=device))
