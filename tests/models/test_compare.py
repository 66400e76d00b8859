"""diff: errors per layer and per gradient against a wider truth."""

import pytest
import torch
from torch import nn

import tilewright as tw
from tilewright.models.replacements import norm


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(torch.bfloat16)


def test_our_kernels_are_as_close_as_the_original(model):
    x, state = torch.randn(5, 16, dtype=torch.bfloat16), torch.get_rng_state()
    difference = tw.diff(model, x)
    assert difference, str(difference)
    assert difference.first is None
    rows = {(row.name, row.what) for row in difference.rows}
    assert {("0.norm", "output"), ("1", "output"), ("0.norm.weight", "gradient")} <= rows
    assert all(0 < row.original < 0.05 for row in difference.rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_first_layer_that_is_too_far_off_is_named(model, monkeypatch):
    original = norm.Norm.__call__
    monkeypatch.setattr(norm.Norm, "__call__", lambda self, module, x: original(self, module, x) * 1.1)
    patched = tw.diff(model, torch.randn(5, 16, dtype=torch.bfloat16), include=[])
    assert patched
    # Probing uses the same function, so the fault is planted after it.
    monkeypatch.setattr(
        "tilewright.models.replacements.norm.identify",
        lambda module: norm.Norm(nn.LayerNorm, False, "weight", "bias", 1e-5) if type(module) is nn.LayerNorm else None,
    )
    difference = tw.diff(model, torch.randn(5, 16, dtype=torch.bfloat16))
    assert not difference
    assert difference.first.name == "0.norm"
    assert "first beyond its budget: 0.norm" in str(difference)


def test_a_patched_model_is_compared_with_the_original(model):
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    expected, patched = tw.diff(model, x), tw.apply(model)
    for site in patched.sites:  # a fault in what is patched now, which diff does not measure
        site.forward.point_to(lambda _, x: x, {})
    assert tw.diff(model, x) == expected


def test_a_model_without_gradients(model):
    difference = tw.diff(model.requires_grad_(False), torch.randn(5, 16, dtype=torch.bfloat16))
    assert {row.what for row in difference.rows} == {"output"}


def test_an_output_that_is_overwritten(model):
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(0.0)

    difference = tw.diff(nn.Sequential(*model, InPlace()), torch.randn(5, 16, dtype=torch.bfloat16))
    assert all(row.original > 0 for row in difference.rows if (row.name, row.what) == ("1", "output"))


def test_a_loss_of_the_users(model):
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    difference = tw.diff(model, [x], loss=lambda output: output.float().exp().mean(), truth=torch.float32)
    assert difference.truth == "float32"
    with pytest.raises(TypeError, match="pass loss="):
        tw.diff(nn.Identity(), torch.arange(3))
