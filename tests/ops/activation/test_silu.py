"""Laws of SiLU."""

import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from activation_laws import InplaceLaws
from tilewright.ops.activation import silu as module


class TestSilu(InplaceLaws):
    module, act, call, formula = module, "silu", tw.silu, F.silu


def test_odd_part_is_half_of_x(device):
    x = torch.linspace(-8, 8, 4001, device=device)
    torch.testing.assert_close(tw.silu(x) - tw.silu(-x), x, rtol=1e-6, atol=1e-6)


def test_left_tail_is_accurate(device):
    x = torch.linspace(-80, 0, 5001, device=device)[:-1]
    truth = F.silu(x.double())
    assert ((tw.silu(x).double() / truth - 1).abs() / (1 + x.double().abs())).max() < 5e-7
