"""Laws of the residual with RMS norm."""

import torch

import tilewright as tw
from norm_laws import AddLaws, fast_path  # noqa: F401  an autouse fixture
from support import laid_out
from tilewright.ops.norm import _operators as _norm
from tilewright.ops.norm import add_rms_norm as module


def formula(x, residual, shape, weight=None, eps=None, weight_offset=0.0):
    return _norm.torch_rms_norm(x + residual, shape, weight, eps, weight_offset), x + residual


class TestAddRmsNorm(AddLaws):
    module, call, alone, formula, weights, is_rms = module, tw.add_rms_norm, tw.rms_norm, formula, 1, True


def test_offset_is_added_to_the_weight(device):
    x, w = laid_out((5, 40), "contiguous", device=device), laid_out((40,), "offset", device=device)
    got = tw.add_rms_norm(x, x, (40,), w, 1e-6, weight_offset=1.0)
    torch.testing.assert_close(got, tw.add_rms_norm(x, x, (40,), 1 + w, 1e-6))
