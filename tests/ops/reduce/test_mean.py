"""Laws of the mean."""

import pytest
import torch

import tilewright as tw
from reduction_laws import ReductionLaws, registered, same
from reduction_laws import few_programs as few_programs
from support import crossover_at
from tilewright.ops.reduce import mean as module


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


class TestMean(ReductionLaws):
    module, call, formula, has_dtype = module, tw.mean, torch.mean, True


def test_mean_of_a_constant(device):
    for N in (1, 7, 9000):
        x = torch.full((2, N), 60000.0, device=device, dtype=torch.float16)
        same(tw.mean(x, 1), x[:, 0])
        same(tw.mean(x), x[0, 0])


def test_registered_operators(device):
    registered("mean", device)
