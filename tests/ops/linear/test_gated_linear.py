"""Laws of the gated linear layer."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.ops.linear import gated_linear as module

ACTIVATIONS = [*module.FORMULAS]


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernel for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


def drawn(M, N, K, device, dtype=torch.float32, layout="contiguous"):
    shapes = (M, K), (N, K), (N, K)
    return [laid_out(s, layout, device=device, dtype=dtype, seed=n) / 2 for n, s in enumerate(shapes)]


def leaves_of(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_one_product_times_the_other(activation, dtype, device):
    args = drawn(33, 18, 40, device, dtype)
    assert_right(module.triton_gated_linear(*args, activation), module.reference, *args, activation)


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "relu"])
def test_gradients(activation, device):
    args = drawn(33, 18, 40, device)
    assert_gradients_match(module.triton_gated_linear, module.reference, *args, activation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_exact_on_integers(dtype, device):
    """relu has gradients that are exact as well, as long as gate and up are integers that the dtype represents."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-1, 2, shape, generator=generator).to(device, dtype)
    args = leaves_of(draw(70, 40), draw(33, 40), draw(33, 40))
    y = module.triton_gated_linear(*args, "relu")
    dy = draw(70, 33)
    exact = leaves_of(*(a.double() for a in args))
    wanted = module.reference(*exact, "relu")
    assert torch.equal(y.double(), wanted.to(dtype).double())
    got = torch.autograd.grad(y, args, dy)
    for one, other in zip(got[1:], torch.autograd.grad(wanted, exact, dy.double())[1:], strict=True):
        torch.testing.assert_close(one.double(), other.to(dtype).double(), rtol=0, atol=0)


def test_infinities_and_nan(device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, 0.0], [-inf, 0.0], [nan, 0.0], [1.0, -1.0]], device=device)
    weights = torch.eye(2, device=device) + 1, torch.eye(2, device=device) - 3
    for activation in ACTIVATIONS:
        wanted = module.reference(x, *weights, activation)
        torch.testing.assert_close(module.triton_gated_linear(x, *weights, activation), wanted, equal_nan=True)


@pytest.mark.parametrize("sms", [1, 10**9])  # the largest tile, and the smallest one in several groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kind_of_tile(sms, dtype, device, monkeypatch):
    facts = module.gpu_facts
    monkeypatch.setattr(module, "gpu_facts", lambda device: facts(device)._replace(sms=sms))
    module._plan.cache_clear()
    for sizes in ((650, 70, 19), (5, 150, 128)):
        args = drawn(*sizes, device, dtype)
        assert_right(module.triton_gated_linear(*args, "silu"), module.reference, *args, "silu")
    module._plan.cache_clear()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_rank(layout, device, fast_path):
    x, gate, up = drawn(6, 5, 7, device, layout=layout)
    for given in (x, x[None], x[0]):
        y = tw.gated_linear(given, gate, up, "gelu")
        assert y.shape == F.linear(given, gate).shape
        assert_right(y, module.reference, given, gate, up, "gelu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_any_layout(layout, device):
    args = drawn(6, 5, 7, device)
    dy = laid_out((6, 5), layout, device=device, seed=9)
    leaves, exact = leaves_of(*args), leaves_of(*(a.double() for a in args))
    got = torch.autograd.grad(module.triton_gated_linear(*leaves, "silu"), leaves, dy)
    wanted = torch.autograd.grad(module.reference(*exact, "silu"), exact, dy.double())
    torch.testing.assert_close(got, wanted, check_dtype=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_of_some_inputs(wanted, keeps, device):
    args = [t.requires_grad_(wants) for t, wants in zip(drawn(6, 5, 7, device), wanted, strict=True)]
    needed = [t for t in args if t.requires_grad]
    got = torch.autograd.grad(module.gated_linear_forward(*args, "silu", keeps)[0].sum(), needed)
    torch.testing.assert_close(got, torch.autograd.grad(module.reference(*args, "silu").sum(), needed))


@pytest.mark.parametrize("is_tied", [False, True])
def test_double_backward(is_tied, device):
    x, gate, up = leaves_of(*drawn(3, 4, 5, device))
    args = (x, gate, gate) if is_tied else (x, gate, up)
    leaves = [x, gate] if is_tied else [x, gate, up]

    def twice(fn):
        first = torch.autograd.grad(fn(*args, "silu").square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.testing.assert_close(twice(module.triton_gated_linear), twice(module.reference), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
def test_empty(sizes, device, fast_path):
    M, N, K = sizes
    args = [torch.randn(shape, device=device, requires_grad=True) for shape in ((2, M, K), (N, K), (N, K))]
    ours, theirs = tw.gated_linear(*args), module.reference(*args, "silu")
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), args), torch.autograd.grad(theirs.sum(), args))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_public_function_below_and_above_the_crossover(activation, device, monkeypatch):
    args = drawn(3, 4, 5, device)
    wanted = module.reference(*args, activation)
    torch.testing.assert_close(tw.gated_linear(*args, activation), wanted)
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(2 * 3 * 4 * 5))
    monkeypatch.setattr(module.F, "linear", None)
    torch.testing.assert_close(tw.gated_linear(*args, activation), wanted)


def test_takes_what_torch_takes(device, fast_path):
    x, gate, up = drawn(3, 4, 5, device)
    doubles = x.double(), gate.double(), up.double()
    torch.testing.assert_close(tw.gated_linear(*doubles), module.reference(*doubles, "silu"))
    torch.testing.assert_close(tw.gated_linear(x, gate[0], up[0]), module.reference(x, gate[0], up[0], "silu"))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.gated_linear(x, gate, up).dtype == torch.bfloat16
    ours, theirs = lambda x: tw.gated_linear(x, gate, up), lambda x: module.reference(x, gate, up, "silu")
    torch.testing.assert_close(torch.func.vmap(ours)(x), theirs(x))
    torch.testing.assert_close(torch.func.jvp(ours, (x,), (x,)), torch.func.jvp(theirs, (x,), (x,)))
    for wrong in ((x.t(), gate, up), (x.half(), gate, up)):
        with pytest.raises(RuntimeError):
            tw.gated_linear(*wrong)


def test_bad_arguments(device):
    x, gate, up = drawn(3, 4, 5, device)
    with pytest.raises(ValueError, match=r"activation must be one of relu, .*, not .tanh."):
        tw.gated_linear(x, gate, up, "tanh")
    with pytest.raises(RuntimeError, match="must have the same shape, not"):
        tw.gated_linear(x, gate, up[:1])


def test_registered_operator(device):
    args = leaves_of(*drawn(6, 5, 7, device))
    for keeps in (False, True):
        torch.library.opcheck(module.gated_linear_forward.registered, (*args, "silu", keeps))
    both = lambda *args: (tw.gated_linear(*args, "relu"), module.triton_gated_linear(*args, "gelu"))
    assert_compiles(both, *drawn(6, 5, 7, device))
