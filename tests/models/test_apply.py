"""Patching modules that no library wrote: replaced by what they compute, restored exactly."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import tilewright as tw


class ScaledNorm(nn.Module):
    """An RMS norm under another name, with the weight stored around zero."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.epsilon = 1e-3

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * (1 + self.gain)


class AbsNorm(ScaledNorm):
    """Almost an RMS norm."""

    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + self.epsilon) * self.gain


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w2 = nn.Linear(inner, width)
        self.w1 = nn.Linear(width, inner)
        self.w3 = nn.Linear(width, inner)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Packed(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.both = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.out(self.act(gate) * up)


class Ungated(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.act = nn.GELU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.first, self.second = ScaledNorm(width), nn.LayerNorm(width)
        self.gated, self.packed, self.ungated = FeedForward(width, 40), Packed(width, 16), Ungated(width, 32)
        self.odd = AbsNorm(width)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.gated(self.first(x))
        x = x + self.packed(self.second(x))
        return self.odd(x + self.ungated(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def tokens():
    return torch.arange(12).view(2, 6)


def kernels(patched) -> dict[str, str]:
    return {site.name: site.kernel for site in patched.sites}


def forwards(model) -> dict[str, object]:
    return {name: vars(module).get("forward") for name, module in model.named_modules()}


def test_modules_are_recognised_by_the_values_they_compute(model):
    patched = tw.apply(model)
    assert kernels(patched) == {
        "first": "rms_norm",
        "second": "layer_norm",
        "gated": "swiglu",
        "packed": "geglu",
        "ungated.act": "gelu",
    }
    (skipped,) = patched.skipped
    assert (skipped.name, skipped.kind) == ("odd", "norm")
    assert "neither an RMS norm nor a layer norm" in str(patched)


def test_the_offset_and_the_epsilon_of_a_norm_are_found(model):
    site = next(site for site in tw.apply(model).sites if site.name == "first")
    norm = site.forward.keywords["norm"]
    assert (norm.offset, norm.eps, norm.weight) == (1.0, 1e-3, "gain")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_two_forms_of_gelu_are_told_apart(model, approximate):
    model.packed.act, model.ungated.act = nn.GELU(approximate), nn.GELU(approximate)
    forwards = {site.name: site.forward.keywords for site in tw.apply(model).sites}
    suffix = " (tanh)" if approximate == "tanh" else ""
    assert forwards["packed"]["gated"] == "geglu" + suffix
    assert forwards["ungated.act"]["activation"] == "gelu" + suffix


def test_an_epsilon_is_found_beside_a_smaller_number(model):
    model.first.epsilon, model.first.decay = 1e-6, 1e-8
    site = next(site for site in tw.apply(model).sites if site.name == "first")
    assert site.forward.keywords["norm"].eps == 1e-6


def test_outputs_and_gradients_agree(model, tokens):
    expected = model(tokens)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with tw.apply(model):
        result = model(tokens)
        result.square().sum().backward()
    torch.testing.assert_close(result, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


def test_revert_restores_everything(model, tokens):
    before, state, modules, expected = forwards(model), model.state_dict(), [*model.modules()], model(tokens)
    patched = tw.apply(model)
    assert forwards(model) != before
    patched.revert()
    patched.revert()
    assert forwards(model) == before
    assert [*model.modules()] == modules
    assert model.state_dict().keys() == state.keys()
    assert all(model.state_dict()[name].data_ptr() == value.data_ptr() for name, value in state.items())
    assert torch.equal(model(tokens), expected)


def test_the_context_reverts_after_an_error(model):
    with pytest.raises(RuntimeError, match="stop"), tw.apply(model):
        raise RuntimeError("stop")
    assert not any(forwards(model).values())


def test_another_instance_and_the_class_are_untouched(model, tokens):
    other = Model()
    expected = other(tokens)
    tw.apply(model)
    assert not any(forwards(other).values())
    assert torch.equal(other(tokens), expected)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_patched_and_uses_its_own_parameters(model, tokens, how):
    tw.apply(model)
    expected = model(tokens)
    other = how(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(tokens), expected)
    assert isinstance(vars(other.first)["forward"], functools.partial)


def test_applying_does_not_touch_the_random_state(model):
    state = torch.get_rng_state()
    tw.apply(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_without_graph_breaks(model, tokens):
    expected = model(tokens)
    tw.apply(model)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens), expected)


def test_without_runs_the_original_of_one_kind(model):
    patched = tw.apply(model)
    with patched.without("norm"):
        assert not vars(model.first).get("forward")
        assert vars(model.gated)["forward"]
    assert vars(model.first)["forward"]
    patched.revert()
    with patched.without():
        pass
    assert not any(forwards(model).values())


def test_kinds_are_selected(model):
    assert {site.kind for site in tw.apply(model, include=["norm"]).sites} == {"norm"}
    assert {site.kind for site in tw.apply(Model(), exclude=["norm", "activation"]).sites} == {"mlp"}


def test_a_norm_of_mixed_dtypes_runs_the_original(model):
    model.first.to(torch.bfloat16)
    x = torch.randn(3, 24)
    expected = model.first(x)
    tw.apply(model)
    result = model.first(x)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_autocast_runs_the_original(model):
    x = torch.randn(3, 24)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.gated(x)
        tw.apply(model)
        result = model.gated(x)
    assert torch.equal(result, expected)


def test_a_forward_that_something_else_replaced_is_left_alone(model):
    model.first.forward = lambda x: x
    patched = tw.apply(model)
    assert "first" not in kernels(patched)
    assert any(s.name == "first" and "something else" in s.reason for s in patched.skipped)


def test_torchs_own_layer_is_patched():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    with tw.apply(layer) as patched:
        assert kernels(patched) == {"norm1": "layer_norm", "norm2": "layer_norm"}
        torch.testing.assert_close(layer(x), expected)


def test_bad_input(model):
    with pytest.raises(ValueError, match="unknown kind 'norms': choose from activation, head"):
        tw.apply(model, include=["norms"])
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not int"):
        tw.apply(3)
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        tw.apply(Model())
    tw.apply(model)
    with pytest.raises(ValueError, match=r"already patched \(first\): call revert\(\) first"):
        tw.apply(model)


def test_nothing_is_patched_if_the_optimizer_is_refused(model):
    with pytest.raises(ValueError, match=r"must be a torch.optim.AdamW, not SGD"):
        tw.apply(model, optimizer=torch.optim.SGD(model.parameters()))
    assert not any(forwards(model).values())
