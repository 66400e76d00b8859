"""Laws of ReLU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from activation_laws import InplaceLaws, inf, nan
from tilewright.ops.activation import relu as module


class TestRelu(InplaceLaws):
    module, act, call, formula = module, "relu", tw.relu, F.relu


def test_relu_is_idempotent_and_both_halves_sum_to_x(device):
    x = torch.randn(1000, device=device)
    assert torch.equal(tw.relu(tw.relu(x)), tw.relu(x))
    assert torch.equal(tw.relu(x) - tw.relu(-x), x)


def test_gradient_is_zero_for_non_positive_inputs(device):
    x = torch.tensor([-1.0, 0.0, 2.0, nan], device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(tw.relu(x), x, torch.tensor([inf, nan, inf, 5.0], device=device))
    assert dx.tolist() == [0.0, 0.0, inf, 5.0]


def test_backward_saves_the_output_and_not_the_input(device):
    x = torch.randn(8, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = tw.relu(x)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_errors_match_torch(device):
    bad: Any
    for bad in (3, None, torch.ones(3, device=device, dtype=torch.bool)):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            F.relu(bad)
        with pytest.raises(theirs.type) as ours:
            tw.relu(bad)
        assert str(ours.value) == str(theirs.value)
