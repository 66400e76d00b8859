"""Laws of the linear layer, for every kernel."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import (
    LAYOUTS,
    assert_compiles,
    assert_gradients_match,
    assert_right,
    crossover_at,
    few_examples,
    laid_out,
    layouts,
    shapes,
)
from tilewright.ops.linear import _triton
from tilewright.ops.linear import linear as module
from tilewright.runtime.gpus import gpu_facts

FORMS = ["eager", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]
OWN = FORMS[1:]  # forms of our operator that take any input


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our operator for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


def run(form, *args):
    return module.op.kernels[form].fn(*args)


def drawn(M, N, K, device, relu=True, dtype="float32"):
    (case,) = module.points(M=(M,), N=(N,), K=(K,), relu=(relu,))
    return module.op.make(case.with_dtype(dtype), device)


@pytest.mark.parametrize("form", FORMS)
def test_linear_in_x_and_bias_is_added_once(form, device):
    x, weight, bias, _ = drawn(70, 33, 40, device, relu=False)
    other = x.flip(0)
    zero = torch.zeros_like(bias)
    sum_of_parts = 3 * run(form, x, weight, zero, False) + run(form, other, weight, zero, False)
    torch.testing.assert_close(run(form, 3 * x + other, weight, zero, False), sum_of_parts, rtol=1e-4, atol=1e-4)
    shift = run(form, x, weight, bias, False) - run(form, x, weight, zero, False)
    torch.testing.assert_close(shift, bias.expand(70, 33), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_identity_weight_returns_x_exactly(form, device):
    x = laid_out((19, 37), "contiguous", device=device, dtype=torch.float16)
    weight, zero = torch.eye(37, device=device, dtype=x.dtype), torch.zeros(37, device=device, dtype=x.dtype)
    assert torch.equal(run(form, x, weight, zero, False), x)
    assert torch.equal(run(form, x, weight, zero, True), x.relu())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_relu_is_not_negative_and_idempotent(form, dtype, device):
    x, weight, bias, _ = drawn(65, 66, 67, device, dtype=dtype)
    y = run(form, x, weight, bias, True)
    assert (y >= 0).all()
    assert (y == 0).any()
    assert torch.equal(y, run(form, x, weight, bias, False).relu())
    assert torch.equal(y, y.relu())


@pytest.mark.parametrize("form", FORMS)
def test_infinities_and_nan(form, device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, 0.0], [-inf, 0.0], [nan, 0.0], [1.0, -1.0]], device=device)
    weight, bias = torch.eye(2, device=device) + 1, torch.zeros(2, device=device)
    for relu in (False, True):
        wanted = module.reference(x, weight, bias, relu)
        torch.testing.assert_close(run(form, x, weight, bias, relu), wanted, equal_nan=True)


@pytest.mark.parametrize("smallest_grid", [1, 10**9])  # the largest tile, and the smallest one in several groups
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kind_of_tile(smallest_grid, dtype, device, monkeypatch):
    monkeypatch.setattr(_triton, "gpu_facts", lambda device: gpu_facts(device)._replace(sms=smallest_grid))
    x, weight, bias, relu = drawn(650, 70, 19, device, dtype=dtype)
    assert_right(run("triton", x, weight, bias, relu), module.reference, x, weight, bias, relu)
    x, weight, bias, relu = drawn(5, 300, 256, device, dtype=dtype)
    assert_right(run("triton", x, weight, bias, relu), module.reference, x, weight, bias, relu)


@pytest.mark.slow
@few_examples
@given(shape=shapes, N=st.integers(1, 9), layout=layouts, has_bias=st.booleans())
def test_any_shape_and_layout(shape, N, layout, has_bias, device, fast_path):
    x = laid_out(shape, layout, device=device)
    weight = laid_out((N, shape[-1]), layout, device=device, seed=1)
    bias = laid_out((N,), layout, device=device, seed=2) if has_bias else None
    got = tw.linear(x, weight, bias, activation="relu")
    assert got.shape == F.linear(x, weight).shape
    assert_right(got, lambda *args: torch.relu(F.linear(*args)), x, weight, *([bias] if has_bias else []))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("form", OWN)
def test_gradients(form, relu, device):
    x, weight, bias, _ = drawn(70, 33, 40, device, relu)
    fn = lambda x, w, b: run(form, x, w, b, relu)
    assert_gradients_match(fn, lambda x, w, b: module.reference(x, w, b, relu), x, weight, bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout(layout, device, fast_path):
    x, weight, bias, _ = drawn(6, 5, 7, device)
    leaves = [t.clone().requires_grad_() for t in (x[None], weight, bias)]
    y = tw.linear(*leaves, activation="relu")
    dy = laid_out(tuple(y.shape), layout, device=device)
    exact = [t.double().requires_grad_() for t in (x[None], weight, bias)]
    wanted = torch.autograd.grad(torch.relu(F.linear(*exact)), exact, dy.double())
    got = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(got, wanted, check_dtype=False)


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_of_some_inputs(form, wanted, device):
    args = [t.requires_grad_(wants) for t, wants in zip(drawn(6, 5, 7, device)[:3], wanted, strict=True)]
    run(form, *args, True).sum().backward()
    ours = [t.grad for t in args]
    for t in args:
        t.grad = None
    module.reference(*args, True).sum().backward()
    assert [t is not None for t in ours] == list(wanted)
    torch.testing.assert_close([t for t in ours if t is not None], [t.grad for t in args if t.requires_grad])


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("relu", [False, True])
def test_double_backward(form, relu, device):
    args = [t.requires_grad_() for t in drawn(3, 4, 5, device, relu)[:3]]

    def twice(fn):
        first = torch.autograd.grad(fn(*args, relu).square().sum(), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    torch.testing.assert_close(twice(lambda *a: run(form, *a)), twice(module.reference))


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
def test_empty(sizes, device, fast_path):
    M, N, K = sizes
    args = [torch.randn(shape, device=device, requires_grad=True) for shape in ((2, M, K), (N, K), (N,))]
    ours, theirs = tw.linear(*args, activation="relu"), torch.relu(F.linear(*args))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), args), torch.autograd.grad(theirs.sum(), args))


def test_accepts_what_torch_accepts(device, fast_path):
    x, weight, bias, _ = drawn(3, 4, 5, device)
    for b in (None, bias):
        torch.testing.assert_close(tw.linear(x, weight, b), F.linear(x, weight, b))
        torch.testing.assert_close(tw.linear(x[0], weight, b, activation="relu"), F.linear(x[0], weight, b).relu())
    vector = weight[0]
    torch.testing.assert_close(tw.linear(x, vector, activation="relu"), F.linear(x, vector).relu())
    torch.testing.assert_close(tw.linear(x, weight, bias[:1], activation="relu"), F.linear(x, weight, bias[:1]).relu())
    doubles = (x.double(), weight.double(), bias.double())
    torch.testing.assert_close(tw.linear(*doubles, activation="relu"), F.linear(*doubles).relu())
    for wrong in ((x.t(), weight, bias), (x, weight, bias[:3]), (x.half(), weight, bias)):
        with pytest.raises(RuntimeError):
            tw.linear(*wrong, activation="relu")


@pytest.mark.parametrize(
    ("sizes", "wins"),
    [
        ((4096, 4096, 4096), True),
        ((1024, 4096, 4096), True),
        ((1536, 4608, 4096), False),  # 216 tiles for 132 SMs
        ((4096, 4096, 4100), False),  # rows that TMA cannot read
    ],
)
def test_fused_kernel_wins_with_many_full_tiles(sizes, wins):
    M, N, K = sizes
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((M, K), (K, N)))
    assert module._wins(a, b) == wins


def test_fused_epilogue_runs_only_where_it_wins(device, monkeypatch):
    x, weight, bias, _ = drawn(3, 4, 5, device)
    calls = []
    monkeypatch.setattr(module, "linear_forward", lambda *args: calls.append(args) or torch.zeros(3, 4))
    tw.linear(x, weight, bias, activation="relu")
    assert not calls
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(3 * 4 * 5))
    tw.linear(x, weight, bias)
    assert not calls
    tw.linear(x, weight, bias, activation="relu")
    assert len(calls) == 1


@pytest.mark.parametrize("activation", ["none", "ReLU", "", torch.relu])
def test_unknown_activation(activation, device):
    x, weight, bias, _ = drawn(3, 4, 5, device)
    with pytest.raises(ValueError, match="must be None or one of relu, "):
        tw.linear(x, weight, bias, activation=activation)


def test_autocast_matches_torch(device, fast_path):
    x, weight, bias, _ = drawn(3, 4, 5, device)
    with torch.autocast(device, dtype=torch.float16):
        assert tw.linear(x, weight, bias, activation="relu").dtype == torch.float16


def test_functional_transforms_match_torch(device, fast_path):
    x, weight, bias, _ = drawn(3, 4, 5, device)
    ours, theirs = lambda x: tw.linear(x, weight, bias, activation="relu"), lambda x: F.linear(x, weight, bias).relu()
    torch.testing.assert_close(torch.func.vmap(ours)(x), theirs(x))
    torch.testing.assert_close(torch.func.jvp(ours, (x,), (x,)), torch.func.jvp(theirs, (x,), (x,)))


@pytest.mark.parametrize("form", OWN)
def test_registered_operators(form, device, fast_path):
    x, weight, bias, _ = drawn(6, 5, 7, device)
    args = [t.requires_grad_() for t in (x, weight, bias)]
    for activation in ("none", "relu"):
        torch.library.opcheck(module.linear_forward.registered, (*args, None, activation, form))
    assert_compiles(lambda *args: tw.linear(*args, activation="relu"), x[None].detach(), weight.detach())


def drawn_for_tma(device, dtype=torch.bfloat16):
    """Return x, weight, bias and residual that every form takes."""
    shapes = (72, 64), (136, 64), (136,), (72, 136)
    return [laid_out(shape, "contiguous", device=device, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("activation", module.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["triton", "gluon"])
def test_epilogues(form, dtype, activation, has_residual, has_bias, device):
    if form == "gluon" and dtype == torch.float32:
        pytest.skip("16-bit floats only")
    x, weight, bias, residual = drawn_for_tma(device, dtype)
    args = x, weight, bias if has_bias else None, residual if has_residual else None, activation
    assert_right(module.linear_forward(*args, form), module.unfused, *args)


@pytest.mark.parametrize("activation", module.ACTIVATIONS)
def test_gradients_of_epilogues(activation, device):
    args = [t.double().float() for t in drawn_for_tma(device)]
    fn = lambda *args: module.linear_forward(*args, activation, "triton")
    assert_gradients_match(fn, lambda *args: module.unfused(*args, activation), *args)


def test_double_backward_of_an_epilogue(device):
    args = [(t.float() / 8).requires_grad_() for t in drawn_for_tma(device)]

    def twice(fn):
        first = torch.autograd.grad(fn(*args).square().sum(), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    ours = twice(lambda *args: module.linear_forward(*args, "silu", "triton"))
    torch.testing.assert_close(ours, twice(lambda *args: module.unfused(*args, "silu")), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", [None, *module.FORMULAS])
@pytest.mark.parametrize("wants_gradients", [False, True])
def test_public_epilogues(activation, wants_gradients, device, fast_path):
    x, weight, bias, residual = (t.requires_grad_(wants_gradients) for t in drawn_for_tma(device, torch.float32))
    y = tw.linear(x[None], weight, bias, activation=activation, residual=residual[None])
    wanted = module.unfused(x[None], weight, bias, residual[None], activation or "none")
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    broadcast = tw.linear(x, weight, bias, activation=activation, residual=bias)
    torch.testing.assert_close(
        broadcast, module.unfused(x, weight, bias, bias, activation or "none"), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(RuntimeError):
        tw.linear(x, weight, bias, activation=activation, residual=residual[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("form", OWN)
def test_tf32_only_when_torch_allows_it(form, device, monkeypatch):
    x, weight, bias, _ = drawn(256, 256, 256, device, relu=False)
    exact = module.reference(x.double(), weight.double(), bias.double(), False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert (run(form, x, weight, bias, False) - exact).abs().max() < 1e-5
    if form == "triton":
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        assert (run(form, x, weight, bias, False) - exact).abs().max() > 1e-5
