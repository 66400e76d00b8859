"""apply(linear=…): quantised weights in a model, their cost, and the way back."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import nn

import tilewright as tw


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 64)
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 30, bias=False)
        self.tied = nn.Linear(64, 30, bias=False)
        self.tied.weight = self.embedding.weight

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.head(x + self.down(F.gelu(self.up(x)))) + self.tied(x)


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return Model().to(device)


@pytest.fixture
def tokens(device):
    return torch.arange(12, device=device).view(2, 6)


def test_the_model_computes_with_the_dequantised_weights(model, tokens):
    expected = copy.deepcopy(model)
    for layer in (expected.up, expected.down):
        layer.weight.data = tw.quantize(layer.weight.data, "int4-g32").dequantize()
    tw.apply(model, linear="int4-g32", include=[])
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected(tokens), rtol=1e-4, atol=1e-4)


def test_revert_restores_the_same_parameters(model, tokens):
    before, weights, names = model(tokens), [*model.parameters()], [*model.state_dict()]
    patched = tw.apply(model, linear="int8")
    assert {name.rpartition(".")[0] for name in model.state_dict() if "codes" in name} == {
        "up.quantized_weight",
        "down.quantized_weight",
    }
    assert not torch.equal(model(tokens), before)
    patched.revert()
    patched.revert()
    assert {id(p) for p in model.parameters()} == {id(p) for p in weights}
    assert {*model.state_dict()} == {*names}
    assert torch.equal(model(tokens), before)


def test_the_report_names_layers_memory_and_noise(model):
    patched = tw.apply(model, linear="int8", include=[])
    assert [layer.name for layer in patched.quantized] == ["up", "down"]
    text = str(patched)
    assert "linear: int8  up, down" in text
    # fp32 weights of 64 and 96 columns become rows of 64 and 128 bytes with an fp32 scale.
    ratio = 4 * 2 * 64 * 96 / (96 * (64 + 4) + 64 * (128 + 4))
    worst = min(patched.quantized, key=lambda layer: layer.snr)
    assert f"weights of 2 linear layers: 0.0 MB are now 0.0 MB ({ratio:.1f}x less); " in text
    assert f"signal-to-noise ratio at least {worst.snr:.1f} dB ({worst.name})" in text
    assert "left alone, linear: it is the output layer, which needs more precision: head" in text
    assert "left alone, linear: its weight is shared with another module: tied" in text


def test_the_signal_to_noise_ratio_is_that_of_uniform_rounding(model):
    """Errors of rounding to steps are uniform, with a variance of step^2 / 12."""
    layer = tw.apply(model, linear="int8", include=[]).quantized[0]
    weight = layer.original.data
    step = weight.abs().amax(1, keepdim=True) / 127
    expected = 10 * math.log10(weight.square().sum() / (step.square() / 12).expand_as(weight).sum())
    assert abs(layer.snr - expected) < 0.2


def test_gradients_reach_biases_and_inputs_but_no_quantised_weight(model, tokens):
    tw.apply(model, linear="nf4")
    model(tokens).square().sum().backward()
    assert model.up.bias.grad is not None
    assert model.embedding.weight.grad is not None
    assert "weight" not in dict(model.up.named_parameters())


def test_a_copy_and_a_checkpoint_work(model, tokens):
    tw.apply(model, linear="mxfp4")
    expected = model(tokens)
    copied = copy.deepcopy(model)
    model.up.quantized_weight.codes.zero_()
    assert torch.equal(copied(tokens), expected)
    model.load_state_dict(copied.state_dict())
    assert torch.equal(model(tokens), expected)


def test_diff_shows_the_error_of_the_logits(model, tokens):
    difference = tw.diff(model, tokens, linear="int4-g32", include=[])
    head = next(row for row in difference.rows if row.name == "head")
    assert head.original < 1e-5
    assert 1e-3 < head.ours < 0.5


def test_torchs_own_layers_keep_their_weights():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    patched = tw.apply(layer, linear="int8")
    assert not patched.quantized
    assert "its parent reads the weight: linear1, linear2" in str(patched)
    layer(torch.randn(1, 3, 32))


def test_bad_formats_and_weights_change_nothing(model, tokens):
    before = model(tokens)
    with pytest.raises(ValueError, match="unknown format 'int3'"):
        tw.apply(model, linear="int3")
    with torch.no_grad():
        model.down.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the weight has NaN or infinities"):
        tw.apply(model, linear="int8")
    with torch.no_grad():
        model.down.weight[0, 0] = 0
    assert not any("forward" in vars(module) for module in model.modules())
    assert model(tokens).shape == before.shape
