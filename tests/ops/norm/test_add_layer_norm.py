"""Laws of the residual with layer norm."""

import torch

import tilewright as tw
from norm_laws import AddLaws, fast_path  # noqa: F401  an autouse fixture
from support import laid_out
from tilewright.ops.norm import _operators as _norm
from tilewright.ops.norm import add_layer_norm as module


def formula(x, residual, shape, weight=None, bias=None, eps=1e-5):
    return _norm.torch_layer_norm(x + residual, shape, weight, bias, eps), x + residual


class TestAddLayerNorm(AddLaws):
    module, call, alone, formula, weights, is_rms = module, tw.add_layer_norm, tw.layer_norm, formula, 2, False


def test_opposite_residual_leaves_the_bias(device):
    x, bias = laid_out((5, 40), "contiguous", device=device), laid_out((40,), "offset", device=device)
    normed, total = tw.add_layer_norm(x, -x, (40,), None, bias)
    assert not total.any()
    assert torch.equal(normed, bias.expand(5, 40))
