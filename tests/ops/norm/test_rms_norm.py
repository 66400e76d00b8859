"""Laws of RMS norm."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from norm_laws import FLOATS, NormLaws, fast_path  # noqa: F401  an autouse fixture
from support import assert_gradients_match, assert_right, laid_out
from tilewright.ops.norm import _operators as _norm
from tilewright.ops.norm import rms_norm as module


def formula(x, shape, weight=None, eps=None, weight_offset=0.0):
    return _norm.torch_rms_norm(x, shape, weight, eps, weight_offset)


class TestRmsNorm(NormLaws):
    module, call, formula, weights, is_rms = module, tw.rms_norm, formula, 1, True


def test_rows_are_normalized_and_invariant_to_scale(device):
    x = laid_out((5, 300), "contiguous", device=device)
    y = tw.rms_norm(x, (300,), eps=0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5, device=device))
    torch.testing.assert_close(tw.rms_norm(1e9 * x, (300,), eps=0.0), y)
    torch.testing.assert_close(tw.rms_norm(-x, (300,), eps=0.0), -y)


def test_the_gradient_is_orthogonal_to_the_row(device):
    x = laid_out((5, 300), "contiguous", device=device).requires_grad_()
    w = laid_out((300,), "contiguous", device=device, seed=1)
    (dx,) = torch.autograd.grad(
        tw.rms_norm(x, (300,), w, eps=0.0), x, laid_out((5, 300), "offset", device=device, seed=2)
    )
    torch.testing.assert_close((dx * x).sum(-1), torch.zeros(5, device=device), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_offset_is_added_to_the_weight(dtype, device):
    x = laid_out((5, 40), "contiguous", device=device, dtype=dtype)
    w = laid_out((40,), "offset", device=device, dtype=dtype)
    for weight in (w, w.float()):
        got = tw.rms_norm(x, (40,), weight, 1e-6, weight_offset=1.0)
        wide = F.rms_norm(x.float(), (40,), 1 + weight.float(), 1e-6)
        torch.testing.assert_close(got.float(), wide, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert_right(got, module.reference, x, weight, 1e-6, 1.0)
        assert_gradients_match(module.public, module.reference, x, weight, 1e-6, 1.0)
    assert torch.equal(tw.rms_norm(x, (40,), weight_offset=1.0), tw.rms_norm(x, (40,)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_default_eps_matches_torch(dtype, device):
    x = laid_out((5, 40), "contiguous", device=device).mul(1e-3).to(dtype)  # so small that eps matters
    torch.testing.assert_close(tw.rms_norm(x, (40,)), F.rms_norm(x, (40,)))


def test_overflowing_squares_give_zeros_as_torch(device):
    x = torch.full((2, 64), 1e30, device=device)
    assert torch.equal(tw.rms_norm(x, (64,)), F.rms_norm(x, (64,)))
