"""Laws of squared ReLU."""

import torch

import tilewright as tw
from activation_laws import PlainLaws
from tilewright.ops.activation import relu_squared as module


class TestReluSquared(PlainLaws):
    module, act, call, formula = module, "relu_squared", tw.relu_squared, lambda x: torch.relu(x).square()


def test_doubling_x_quadruples_y_and_both_halves_sum_to_x_squared(device):
    x = torch.randn(1000, device=device)
    assert torch.equal(tw.relu_squared(2 * x), 4 * tw.relu_squared(x))
    assert torch.equal(tw.relu_squared(x) + tw.relu_squared(-x), x * x)
