"""Laws of logsumexp."""

import pytest
import torch

import tilewright as tw
from reduction_laws import ReductionLaws, registered
from reduction_laws import few_programs as few_programs
from support import crossover_at, laid_out
from tilewright.ops.reduce import logsumexp as module


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


class TestLogsumexp(ReductionLaws):
    module, call, formula = module, tw.logsumexp, torch.logsumexp


def test_shifts_with_its_input_and_is_the_denominator_of_softmax(device):
    x = laid_out((5, 700), "contiguous", device=device)
    for scale in (1, 100):
        y = tw.logsumexp(scale * x, 1)
        torch.testing.assert_close(tw.logsumexp(scale * x + 50, 1), y + 50)
        torch.testing.assert_close((scale * x - y[:, None]).exp(), torch.softmax(scale * x, 1), rtol=1e-4, atol=1e-6)


def test_rising_and_falling_rows(device):
    x = torch.linspace(-200, 200, 30000, device=device)
    wanted = torch.logsumexp(x.double(), 0).float()
    for row in (x, x.flip(0)):
        torch.testing.assert_close(tw.logsumexp(row, 0), wanted)


def test_registered_operators(device):
    registered("logsumexp", device)
