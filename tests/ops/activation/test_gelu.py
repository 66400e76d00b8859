"""Laws of GELU, for every kernel."""

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from hypothesis import given

import tilewright as tw
from activation_laws import forbid_launches
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
from tilewright.ops.activation import _unary as _activation
from tilewright.ops.activation import gelu as module
from tilewright.runtime import cuda as _cuda

FORMS = ["eager", "manual", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]
OURS = FORMS[2:]
both = pytest.mark.parametrize("approximate", module.APPROXIMATIONS)
inf, nan = float("inf"), float("nan")


def gradient(x, dy, approximate, form):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(module.op.kernels[form].fn(leaf, approximate), leaf, dy)[0]


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@both
@pytest.mark.parametrize("form", FORMS)
def test_odd_part_is_half_of_x_and_large_x_is_unchanged(form, approximate, device):
    gelu = module.op.kernels[form].fn
    x = torch.linspace(-8, 8, 4001, device=device)
    torch.testing.assert_close(gelu(x, approximate) - gelu(-x, approximate), x, rtol=1e-6, atol=1e-6)
    large = torch.linspace(9, 1000, 100, device=device)
    assert torch.equal(gelu(large, approximate), large)
    assert gelu(-large, approximate).abs().max() < 1e-6


@pytest.mark.parametrize("form", OURS)
def test_left_tail_is_accurate(form, device):
    """Where 1 + erf of torch cancels to zero, the exact kernel is accurate to the last digits."""
    x = torch.linspace(-12, 0, 5001, device=device)[:-1]
    got = module.op.kernels[form].fn(x, "none")
    truth = x.double() * 0.5 * torch.special.erfc(-x.double() / 2**0.5)
    assert ((got.double() / truth - 1).abs() / (1 + x.double() ** 2)).max() < 5e-7


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form, dtype, approximate, device):
    x = torch.tensor([1e30, -1e30, 6e4, -6e4, 100, -100, 0.0, nan, -inf], device=device).to(dtype)
    x = x[x != inf]
    gelu = module.op.kernels[form].fn
    torch.testing.assert_close(gelu(x, approximate), F.gelu(x, approximate=approximate), equal_nan=True)
    if form in ("triton", "cuda"):  # torch gives NaN for inf on the CPU and inf on a GPU
        assert gelu(torch.tensor([inf], device=device, dtype=dtype), approximate).item() == inf


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", OURS)
def test_gradient_of_extreme_values(form, dtype, approximate, device):
    """One on the right and zero on the left, even where torch's tanh approximation computes inf * 0."""
    x = torch.tensor([100, 6e4, 1e30, -100, -6e4, -1e30], device=device).to(dtype)
    x = x[x.isfinite()]
    dx = gradient(x, torch.full_like(x, 3), approximate, form)
    assert torch.equal(dx, torch.where(x > 0, 3.0, 0.0).to(dtype))
    assert gradient(x[:1] * nan, x[:1], approximate, form).isnan().all()


@both
@pytest.mark.parametrize("form", OURS)
@pytest.mark.parametrize("N", [2**13, 2**13 + 1])
def test_even_and_uneven_tiles(form, N, approximate, device):
    """Tiles with and without a boundary mask, in aligned and unaligned memory."""
    for layout in ("contiguous", "offset"):
        x = laid_out((N,), layout, device=device, dtype=torch.float16)
        assert_right(module.op.kernels[form].fn(x, approximate), module.reference, x, approximate)


@few_examples
@given(shape=shapes, layout=layouts)
def test_any_shape_and_layout(shape, layout, device, fast_path):
    x = laid_out(shape, layout, device=device)
    for approximate in module.APPROXIMATIONS:
        got = tw.gelu(x, approximate)
        assert_right(got, module.reference, x, approximate)
        assert got.stride() == F.gelu(x).stride()


@both
@pytest.mark.parametrize("form", ["manual", *OURS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, form, approximate, device):
    x = laid_out((6, 33), layout, device=device)
    kernel = module.op.kernels[form].fn
    assert_gradients_match(lambda x: kernel(x, approximate), lambda x: F.gelu(x, approximate=approximate), x)


@both
def test_double_backward(approximate, device, fast_path):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    (ours,) = torch.autograd.grad(tw.gelu(x, approximate).square().sum(), x, create_graph=True)
    (theirs,) = torch.autograd.grad(F.gelu(x, approximate=approximate).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


@both
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_accepts_what_torch_accepts(shape, approximate, device, fast_path):
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(tw.gelu(x, approximate), F.gelu(x, approximate=approximate))
    torch.testing.assert_close(tw.gelu(x.double(), approximate), F.gelu(x.double(), approximate=approximate))
    assert module.op.kernels["triton"].fn(x, approximate).shape == shape


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that nested tensors are a prototype
def test_nested_tensors_match_torch(device, fast_path):
    x = torch.randn(2, 3, device=device)
    torch.testing.assert_close(tw.gelu(torch.nested.nested_tensor([x, x])).unbind()[0], F.gelu(x))


def test_errors_match_torch(device, fast_path):
    x = torch.randn(4, device=device)
    bad: Any
    for bad in ((x, "sigmoid"), (x, None), (3, "none"), (x.int(), "none")):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            F.gelu(bad[0], approximate=bad[1])
        with pytest.raises(theirs.type) as ours:
            tw.gelu(*bad)
        assert str(ours.value) == str(theirs.value)


def test_autocast_and_functional_transforms_match_torch(device, fast_path):
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.gelu(x).dtype == F.gelu(x).dtype
    torch.testing.assert_close(torch.func.vmap(tw.gelu)(x), F.gelu(x))
    torch.testing.assert_close(torch.func.jvp(tw.gelu, (x,), (x,)), torch.func.jvp(F.gelu, (x,), (x,)))


def test_small_inputs_go_to_torch(device, monkeypatch):
    forbid_launches(monkeypatch)
    x = torch.randn(8, device=device)
    torch.testing.assert_close(tw.gelu(x), F.gelu(x), rtol=0, atol=0)


def test_registered_operators(device):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    plain = x.detach()
    for act in module.GELUS.values():
        torch.library.opcheck(_activation.activation.registered, (x, act))
    torch.library.opcheck(_activation.activation.registered, (plain.t(), "gelu"))
    torch.library.opcheck(_activation.activation_backward.registered, (plain, plain.t().contiguous().t(), "gelu"))
    assert_compiles(lambda x: module.op.kernels["triton"].fn(x, "tanh"), plain)


@pytest.mark.gpu
def test_registered_operators_of_cuda(device):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    torch.library.opcheck(module.gelu_cuda.registered, (x, "tanh"))
    torch.library.opcheck(module.gelu_cuda_backward.registered, (x.detach(), x.detach(), "none"))


@both
def test_bias_is_added_first(approximate, device):
    x, bias = torch.randn(5, 40, device=device), torch.randn(40, device=device)
    torch.testing.assert_close(tw.gelu(x, approximate, bias=bias), F.gelu(x + bias, approximate=approximate))


def test_compiled_code_calls_torch(device, fast_path):
    x = torch.randn(4, 33, device=device)
    compiled = torch.compile(tw.gelu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, "tanh"), F.gelu(x, approximate="tanh"), rtol=0, atol=0)


def test_cuda_and_triton_share_their_constants():
    """CUDA C++ cannot run without a GPU; its formulas use the constants that the tests above prove in Triton."""

    def constants(text: str) -> set[float]:
        return {float(number) for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", text) if len(number) > 4}

    formulas = [
        getattr(_activation, f"_{name}") for name in ("normal_tail", "tanh_odds", "gelu_parts", "gelu_tanh_parts")
    ]
    in_triton = "".join(inspect.getsource(formula.fn) for formula in formulas)
    cuda = (_cuda.FOLDER / "activation" / "gelu.cu").read_text()
    assert constants(cuda) == constants(in_triton)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["triton", "cuda"])
def test_more_than_2_31_elements(form, device):
    x = torch.zeros(2**31 + 9, device=device, dtype=torch.float16)
    x[-9:] = torch.arange(9)
    torch.testing.assert_close(module.op.kernels[form].fn(x, "tanh")[-20:], F.gelu(x[-20:], approximate="tanh"))
    torch.testing.assert_close(gradient(x, x, "none", form)[-20:], torch.ops.aten.gelu_backward(x[-20:], x[-20:]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_input_is_within_one_ulp(dtype, device, fast_path):
    x = torch.arange(2**16, device=device).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    wide = x.double()
    truth = (wide * torch.special.erfc(-wide / 2**0.5) / 2).to(dtype)  # torch's formula cancels far from zero
    got = tw.gelu(x)
    steps = (got.view(torch.int16).int() - truth.view(torch.int16).int()).abs()
    steps = torch.where(got == truth, 0, steps)  # zeros of either sign are equal
    is_normal = truth.abs() >= torch.finfo(dtype).tiny
    assert steps[is_normal].max() <= 1
    assert (got - truth)[~is_normal].abs().max() < torch.finfo(dtype).tiny
    assert (steps > 0).float().mean() < 0.04
