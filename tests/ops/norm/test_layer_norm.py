"""Laws of layer norm."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from norm_laws import NormLaws, fast_path  # noqa: F401  an autouse fixture
from support import assert_gradients_match, assert_right, laid_out
from tilewright.ops.norm import _operators as _norm
from tilewright.ops.norm import layer_norm as module


def formula(x, shape, weight=None, bias=None, eps=1e-5):
    return _norm.torch_layer_norm(x, shape, weight, bias, eps)


class TestLayerNorm(NormLaws):
    module, call, formula, weights, is_rms = module, tw.layer_norm, formula, 2, False


def test_rows_are_normalized_and_invariant_to_shift_and_scale(device):
    x = laid_out((5, 300), "contiguous", device=device)
    y = tw.layer_norm(x, (300,), eps=0.0)
    torch.testing.assert_close(y.mean(-1), torch.zeros(5, device=device), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5, device=device))
    torch.testing.assert_close(tw.layer_norm(4 * x + 32, (300,), eps=0.0), y, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_orthogonal_to_the_row_and_to_ones(device):
    x = laid_out((5, 300), "contiguous", device=device).requires_grad_()
    w = laid_out((300,), "contiguous", device=device, seed=1)
    y = tw.layer_norm(x, (300,), w, eps=0.0)
    (dx,) = torch.autograd.grad(y, x, laid_out((5, 300), "offset", device=device, seed=2))
    for along in (x, torch.ones_like(x)):
        torch.testing.assert_close((dx * along).sum(-1), torch.zeros(5, device=device), atol=1e-4, rtol=0)


def test_bias_without_weight(device):
    x, bias = laid_out((5, 40), "contiguous", device=device), laid_out((40,), "offset", device=device)
    assert torch.equal(tw.layer_norm(x, (40,), None, bias), tw.layer_norm(x, (40,)) + bias)
    assert_gradients_match(lambda x, b: module.public(x, None, b), lambda x, b: module.reference(x, None, b), x, bias)


@pytest.mark.parametrize("far", [1e3, 1e5])
@pytest.mark.parametrize("N", [300, 40000])
def test_rows_far_from_zero(N, far, device):
    """Rows in one tile and in several blocks, the first of which has another mean than the others."""
    x = laid_out((2, N), "contiguous", device=device)
    x[0, : N // 8] += 50
    x += far
    assert_right(tw.layer_norm(x, (N,)), lambda x: F.layer_norm(x, (N,)), x)
    assert_gradients_match(lambda x: tw.layer_norm(x, (N,)), lambda x: F.layer_norm(x, (N,)), x)
