"""Patching modules that no library wrote: replaced by what they compute, restored exactly."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import tilewright as tw
from tilewright.models import linears
from tilewright.models.replacements import mlp


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
    assert forwards["packed"]["mlp"].gated == "geglu" + suffix
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


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        torch.no_grad,
        functools.partial(torch.device, "meta"),
        functools.partial(torch.autocast, "cpu", torch.bfloat16),
    ],
    ids=["inference_mode", "no_grad", "meta", "autocast"],
)
def test_the_callers_context_does_not_decide_what_is_found(model, context):
    with tw.apply(model) as patched:
        expected = kernels(patched)
    with context():
        assert kernels(tw.apply(model)) == expected


def test_the_default_dtype_does_not_decide_what_is_found(model):
    with tw.apply(model) as patched:
        expected = kernels(patched)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert kernels(tw.apply(model)) == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


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


def test_forward_functions_that_are_no_plain_functions_are_left_alone():
    class OfLambda(nn.Module):
        forward = lambda self, x: x

    class OfBuiltin(nn.LayerNorm):
        forward = torch.relu

    class WithNorms(Model):
        forward = torch.relu

    for odd in (OfLambda(), OfBuiltin(8), WithNorms()):
        model = nn.Sequential(odd, nn.LayerNorm(8))
        found = kernels(tw.apply(model))
        assert found["1"] == "layer_norm"
        assert "0" not in found


def test_quantised_projections_stay_and_their_mlp_is_replaced(model, tokens):
    class QuantisedLinear(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.codes = (linear.weight.detach() * 64).round().to(torch.int8)
            self.bias = linear.bias

        def forward(self, x):
            return nn.functional.linear(x, self.codes.to(x.dtype) / 64, self.bias)

    for name in ("w1", "w2", "w3"):
        setattr(model.gated, name, QuantisedLinear(getattr(model.gated, name)))
    expected = model(tokens)
    patched = tw.apply(model)
    assert kernels(patched)["gated"] == "swiglu"
    torch.testing.assert_close(model(tokens), expected)


def test_torchs_own_layer_is_patched():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    with tw.apply(layer) as patched:
        assert kernels(patched) == {"norm1": "layer_norm", "norm2": "layer_norm"}
        torch.testing.assert_close(layer(x), expected)


def test_bad_input(model):
    with pytest.raises(ValueError, match="unknown kind 'norms': choose from activation, attention, head"):
        tw.apply(model, include=["norms"])
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not int"):
        tw.apply(3)
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        tw.apply(Model())
    with pytest.raises(TypeError, match=r"include takes a list of kinds: include=\['norm'\]"):
        tw.apply(model, include="norm")
    with pytest.raises(TypeError, match="fused"):
        tw.apply(model, fused=True)
    with pytest.raises(ValueError, match="lazy modules without sizes: run it on a batch first"):
        tw.apply(nn.Sequential(nn.LazyLinear(8), nn.LayerNorm(8)))
    with pytest.raises(ValueError, match="the model is compiled by TorchScript"):
        tw.apply(torch.jit.script(nn.Sequential(nn.LayerNorm(8))))
    with pytest.raises(ValueError, match="no parameter of this model"):
        tw.apply(model, optimizer=torch.optim.AdamW(Model().parameters()))
    assert not any(forwards(model).values())


def test_what_is_patched_already_is_left_alone(model, tokens):
    before = forwards(model)
    inner = tw.apply(model.gated)
    outer = tw.apply(model)
    assert "gated" not in kernels(outer)
    assert "left alone, mlp: it is patched already: gated" in str(outer)
    inner.revert()  # not the last one first
    assert "forward" not in vars(model.gated)
    again = tw.apply(model)
    assert kernels(again) == {"gated": "swiglu"}
    assert "norm: it is patched already: first, second" in str(again)
    with tw.apply(model) as third:  # nothing is left to patch, or to revert
        assert third.sites == []
        assert "forward" not in vars(model.packed.act)  # which its MLP covers
    again.revert()
    outer.revert()
    assert forwards(model) == before


def test_models_that_share_modules(model, tokens):
    teacher, expected = Model(), model(tokens)
    teacher.gated = model.gated
    first, second = tw.apply(teacher), tw.apply(model)
    assert "gated" in kernels(first)
    assert "gated" not in kernels(second)
    first.revert()
    torch.testing.assert_close(model(tokens), expected)
    second.revert()
    assert not any(forwards(model).values())
    assert not any(forwards(teacher).values())


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_reverted_by_itself(model, tokens, how):
    expected = model(tokens)
    tw.apply(model)
    other = how(model)
    tw.revert(other)
    assert not any(forwards(other).values())
    assert "forward" in vars(model.gated)
    assert torch.equal(other(tokens), expected)


def test_what_wraps_a_replaced_forward_calls_the_original_after_revert(model, tokens):
    x = torch.randn(3, 24)
    expected = model.gated(x)
    patched = tw.apply(model)
    ours = model.gated.forward
    model.gated.forward = lambda *args: ours(*args)  # as accelerate does for mixed precision
    assert ours.func is mlp.forward
    with patched.without("mlp"):
        assert ours.func is FeedForward.forward
        torch.testing.assert_close(model.gated(x), expected)
    assert ours.func is mlp.forward
    patched.revert()
    assert ours.func is FeedForward.forward
    assert torch.equal(model.gated(x), expected)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_in_the_middle_leaves_nothing_patched(model, tokens, monkeypatch, error):
    before, parameters = forwards(model), [*model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    installed = []

    def install(self):
        if installed:
            raise error
        installed.append(self)
        original(self)

    original = linears.QuantizedLayer.install
    monkeypatch.setattr(linears.QuantizedLayer, "install", install)
    with pytest.raises(error):
        tw.apply(model, linear="int8", optimizer=optimizer)
    assert installed
    assert forwards(model) == before
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(optimizer) is torch.optim.AdamW


def test_children_compiled_by_torchscript_are_left_alone():
    model = nn.Sequential(nn.LayerNorm(8), torch.jit.script(nn.Sequential(nn.LayerNorm(8))))
    x = torch.randn(3, 8)
    expected = model(x)
    patched = tw.apply(model)
    assert kernels(patched) == {"0": "layer_norm"}
    assert "left alone, every kind: it is compiled by TorchScript" in str(patched)
    torch.testing.assert_close(model(x), expected)


class Doubled(nn.Module):
    """The end of a layer whose residual counts twice."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, x, residual):
        return self.norm(self.dense(x) + 2 * residual)


class ClampedSiLU(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x).clamp(max=70.0)


class ClampedSwiGLU(FeedForward):
    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x).clamp(max=7.0)) * self.w3(x).clamp(-7.0, 7.0))


class ScaledInEvaluation(ScaledNorm):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 2.0)


class InFloat32(ScaledNorm):
    def forward(self, x):
        return super().forward(x.float())


class Counting(ScaledNorm):
    """A norm with state of its own."""

    def __init__(self, width: int):
        super().__init__(width)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return super().forward(x)


class Scaled(nn.Module):
    """A residual connection with a factor that is there only if it was trained."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer, self.mlp = nn.Linear(width, width), nn.Linear(width, width)
        self.factor = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        x = x + self.mixer(self.norm1(x)) * (1.0 if self.factor is None else self.factor)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (ClampedSiLU(), "activation"),
        (ClampedSwiGLU(24, 40), "mlp"),
        (ScaledInEvaluation(24), "norm"),
        (InFloat32(24), "norm"),
        (Scaled(24), "residual"),
        (Doubled(), "post_norm"),
        (nn.SiLU(inplace=True), "activation"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_only_elsewhere_is_left_alone(module, kind):
    assert kind not in {site.kind for site in tw.apply(nn.Sequential(module)).sites}


def test_a_module_that_changes_itself_when_it_is_called_is_left_alone():
    module = Counting(24)
    assert kernels(tw.apply(module)) == {}
    assert module.seen == []
    module(torch.randn(3, 24))
    assert len(module.seen) == 1


class Averaging(FeedForward):
    """A gated MLP with a running mean of its inputs."""

    def __init__(self):
        super().__init__(24, 40)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x.mean(), 0.1)
        return super().forward(x)


def test_a_module_with_a_running_mean_keeps_it():
    model = Averaging()
    assert kernels(tw.apply(model)) == {}
    model(torch.ones(2, 24))
    assert model.mean > 0


class WithResidual(ScaledNorm):
    def forward(self, hidden, residual=None):
        return super().forward(hidden if residual is None else hidden + residual)


def test_a_norm_takes_every_call_that_it_took_before():
    norm, x = WithResidual(24), torch.randn(3, 24)
    expected = norm(x), norm(x, x), norm(hidden=x), norm(x, residual=x)
    tw.apply(norm)
    for result, wanted in zip((norm(x), norm(x, x), norm(hidden=x), norm(x, residual=x)), expected, strict=True):
        torch.testing.assert_close(result, wanted)
    with pytest.raises(TypeError, match=r"forward\(\)"):
        norm(x, scale=2.0)


class CodedEpsilon(nn.Module):
    """A norm as in nanoGPT."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), None

    def forward(self, input):
        return nn.functional.layer_norm(input, self.weight.shape, self.weight, self.bias, 2e-4)


class Sized(nn.Module):
    """A packed gate whose halves have sizes of their own, the second half first."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.inner, self.both, self.down = inner, nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x):
        up, gate = self.both(x).split(self.inner, -1)
        return self.down(nn.functional.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm layer with dropout, an option that changes it, and arguments under any names."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.ln_1, self.ln_2, self.drop = CodedEpsilon(width), CodedEpsilon(width), nn.Dropout(dropout)
        self.attn, self.mlp = nn.MultiheadAttention(width, 2, batch_first=True), Sized(width, 32)

    def forward(self, x, mask=None, *, skip=False):
        y = self.ln_1(x)
        y, _ = self.attn(y, y, y, attn_mask=mask, need_weights=False)
        if skip:
            return x + y
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.ln_2(x)))


def test_layers_as_users_write_them():
    torch.manual_seed(0)
    model, x, mask = Block(24), torch.randn(2, 5, 24), torch.ones(5, 5).triu(1).bool()
    calls = ((x,), {}), ((x, mask), {}), ((x,), {"mask": mask}), ((), {"x": x, "skip": True}), ((x, mask), {"skip": 0})
    expected = [model(*args, **kwargs) for args, kwargs in calls]
    patched = tw.apply(model)
    assert kernels(patched) == {"": "add_layer_norm", "ln_1": "layer_norm", "ln_2": "layer_norm", "mlp": "swiglu"}
    for (args, kwargs), wanted in zip(calls, expected, strict=True):
        torch.testing.assert_close(model(*args, **kwargs), wanted)
    for args, kwargs in (((x,), {"masks": mask}), ((x,), {"x": x}), ((), {})):
        with pytest.raises(TypeError, match=r"Block.forward\(\)"):
            model(*args, **kwargs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_norm_that_something_else_replaced_is_called(when):
    model, x = Block(24), torch.randn(2, 5, 24)
    original = model.ln_2.forward

    def replace():
        model.ln_2.forward = lambda x: 2 * original(x)

    if when == "before":
        replace()
        expected = model(x)
        patched = tw.apply(model)
        assert ("", "residual") in {(s.name, s.kind) for s in patched.skipped if "something else" in s.reason}
    else:
        with tw.apply(model) as first:
            assert first.sites
        replace()
        expected = model(x)
        del model.ln_2.forward
        tw.apply(model)
        replace()
    torch.testing.assert_close(model(x), expected)


def test_the_norm_at_the_end_of_a_layer_that_something_else_replaced_is_called():
    class End(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

        def forward(self, x, residual):
            return self.norm(self.dense(x) + residual)

    model, x = End(), torch.randn(3, 24)
    model.norm.forward = torch.sin
    expected = model(x, x)
    patched = tw.apply(model)
    assert patched.sites == []
    assert "post_norm: something else has replaced the forward function of its norm" in str(patched)
    torch.testing.assert_close(model(x, x), expected)


def test_children_that_are_exchanged_later_are_called():
    torch.manual_seed(0)
    model, x = Block(24), torch.randn(2, 5, 24)
    model.mlp = Packed(24, 16)
    patched = tw.apply(model)
    assert {"": "add_layer_norm", "mlp": "geglu"}.items() <= kernels(patched).items()
    model.ln_2, model.mlp.act = nn.RMSNorm(24), nn.SiLU()
    result = model(x)
    patched.revert()
    torch.testing.assert_close(result, model(x))


def test_dropout_that_is_switched_on_later_is_applied():
    class Dropped(FeedForward):
        def __init__(self):
            super().__init__(24, 40)
            self.dropout = nn.Dropout(0.0)

        def forward(self, x):
            return self.dropout(super().forward(x))

    model = Dropped()
    assert kernels(tw.apply(model)) == {"": "swiglu"}
    assert (model(torch.randn(2, 24)) != 0).all()
    model.dropout.p = 1.0
    assert (model(torch.randn(2, 24)) == 0).all()


def test_hooks_of_all_modules_see_a_fused_norm():
    model, seen = Block(24), []
    tw.apply(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(torch.randn(2, 5, 24))
    finally:
        handle.remove()
    assert model.ln_2 in seen


def test_dropout_draws_the_same_numbers():
    model, x = Block(24, dropout=0.5), torch.randn(2, 5, 24)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(model(x))
        patched = tw.apply(model)
    assert "residual" in {site.kind for site in patched.skipped}
    torch.testing.assert_close(*results)
    assert tw.apply(nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm((3, 8)))).skipped == []


def test_hooks_on_an_activation_that_its_mlp_covers_still_run(model, tokens):
    tw.apply(model)
    seen = []
    model.packed.act.register_forward_hook(lambda *_: seen.append(1))
    model(tokens)
    assert seen == [1]


def test_an_mlp_with_dropout_says_so():
    class Dropped(FeedForward):
        def __init__(self):
            super().__init__(24, 40)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(super().forward(x))

    model = nn.Sequential(Dropped()).eval()  # where it does nothing yet
    assert "left alone, mlp: it applies dropout: 0" in str(tw.apply(model))


def test_nothing_is_patched_if_the_optimizer_is_refused(model):
    with pytest.raises(ValueError, match=r"must be a torch.optim.AdamW, not SGD"):
        tw.apply(model, optimizer=torch.optim.SGD(model.parameters()))
    assert not any(forwards(model).values())
