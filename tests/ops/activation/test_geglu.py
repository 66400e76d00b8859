"""Laws of GEGLU."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from activation_laws import GatedLaws
from support import assert_gradients_match, assert_right
from tilewright.ops.activation import geglu as module


class TestGeglu(GatedLaws):
    module, act, call, formula = module, "gelu", tw.geglu, F.gelu


def test_both_forms_of_gelu(device):
    gate, up = torch.randn(2, 5, 24, device=device)
    for approximate in ("none", "tanh"):
        assert_right(tw.geglu(gate, up, approximate), module.reference, gate, up, approximate)

        def of(fn, approximate=approximate):
            return lambda gate, up: fn(gate, up, approximate)

        assert_gradients_match(of(tw.geglu), of(module.reference), gate, up)


def test_unknown_approximation_raises_as_torch(device):
    with pytest.raises(RuntimeError, match="approximate"):
        tw.geglu(torch.randn(4, device=device), None, "sigmoid")
