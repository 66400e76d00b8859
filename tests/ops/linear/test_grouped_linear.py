"""Laws of the grouped linear layer."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from support import LAYOUTS, DispatchLog, assert_compiles, assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.ops.linear import grouped_linear as module

FORMS = ["triton", "loop"]
ENDS = (5, 5, 40, 40, 41, 70)  # two groups are empty


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


def drawn(device, ends=ENDS, rows=None, N=33, K=40, dtype=torch.float32, layout="contiguous"):
    x = laid_out((ends[-1] if rows is None else rows, K), layout, device=device, dtype=dtype)
    weights = laid_out((len(ends), N, K), layout, device=device, dtype=dtype, seed=1)
    return x, weights, torch.tensor(ends, device=device, dtype=torch.int32)


def integers(*shape, dtype, device):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(device, dtype)


def by_loop(x, weights, offsets):
    return module.reference(x, weights, offsets, tuple(offsets.tolist()))


def of(form):
    return lambda x, weights, offsets: module.grouped_linear_forward(x, weights, offsets, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_group_is_a_linear_layer_exactly_on_integers(form, dtype, device):
    x, weights = integers(70, 40, dtype=dtype, device=device), integers(6, 33, 40, dtype=dtype, device=device)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    offsets = torch.tensor(ENDS, device=device)
    y = of(form)(x, weights, offsets)
    starts = (0, *ENDS)
    dy = integers(70, 33, dtype=dtype, device=device)
    dx, dw = torch.autograd.grad(y, (x, weights), dy)
    for group, (start, end) in enumerate(zip(starts, ENDS, strict=False)):
        exact = F.linear(x[start:end].double(), weights[group].double())
        assert torch.equal(y[start:end], exact.to(dtype))
        assert torch.equal(dx[start:end], (dy[start:end].double() @ weights[group].double()).to(dtype))
        assert torch.equal(dw[group], (dy[start:end].double().t() @ x[start:end].double()).to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, device):
    args = drawn(device)
    assert_right(of(form)(*args), by_loop, *args)
    assert_gradients_match(lambda x, w: of(form)(x, w, args[2]), lambda x, w: by_loop(x, w, args[2]), *args[:2])


@pytest.mark.parametrize("ends", [(1,), (0,), (0, 0, 7), (7, 7, 7), (3,) * 17, (64, 130, 200, 300)])
def test_any_number_and_size_of_groups(ends, device):
    args = drawn(device, ends, rows=max(ends) + 2, N=5, K=7)
    y = of("triton")(*args)
    assert_right(y, by_loop, *args)
    assert not y[ends[-1] :].any()


@pytest.mark.parametrize("form", FORMS)
def test_rows_after_the_last_group(form, device):
    x, weights, offsets = drawn(device, rows=203)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = of(form)(x, weights, offsets)
    assert not y[70:].any()
    dx, dw = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
    assert not dx[70:].any()
    (expected,) = torch.autograd.grad(by_loop(x, weights, offsets).sum(), weights)
    torch.testing.assert_close(dw, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [(60, 20, 70, 5, 71, 1000), (-5, -3, 80, 2**31 - 1, 0, 0)])
def test_offsets_that_cannot_be_checked_stay_within_the_matrices(wrong, device):
    """On a GPU, offsets are not checked; under the interpreter, an access out of bounds raises."""
    x, weights, _ = drawn(device)
    offsets = torch.tensor(wrong, device=device)
    assert of("triton")(x, weights, offsets).shape == (70, 33)
    assert module.grouped_weight_gradient(x[:, :33], x, offsets, "triton").shape == weights.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, device, fast_path):
    x, weights, offsets = drawn(device, (2, 2, 6), N=5, K=7, layout=layout)
    assert_right(tw.grouped_linear(x, weights, offsets), by_loop, x, weights, offsets)
    assert_right(tw.grouped_linear(x, weights, offsets.repeat_interleave(2)[::2]), by_loop, x, weights, offsets)
    dy = laid_out((6, 5), layout, device=device, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    got = torch.autograd.grad(tw.grouped_linear(*leaves, offsets), leaves, dy)
    torch.testing.assert_close(got, torch.autograd.grad(by_loop(*leaves, offsets), leaves, dy), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 40, 100])
def test_every_kind_of_tile(rows, dtype, device):
    args = drawn(device, (rows, 2 * rows), N=70, K=64, dtype=dtype)
    assert_right(of("triton")(*args), by_loop, *args)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_double_backward(form, wanted, device):
    x, weights, offsets = drawn(device, (2, 2, 5), N=3, K=4)
    args = [t.requires_grad_(wants) for t, wants in zip((x, weights), wanted, strict=True)]
    needed = [t for t in args if t.requires_grad]

    def twice(fn):
        first = torch.autograd.grad(fn(*args, offsets).pow(3).sum(), needed, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), needed)

    torch.testing.assert_close(twice(of(form)), twice(by_loop), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 4, 5, 2), (3, 0, 5, 2), (3, 4, 0, 2), (3, 4, 5, 0)])
@pytest.mark.parametrize("crossover", [0, float("inf")])
def test_empty(sizes, crossover, device, monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(crossover))
    M, N, K, E = sizes
    x, weights = torch.randn(M, K, device=device), torch.randn(E, N, K, device=device)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    y = tw.grouped_linear(x, weights, [M] * E)
    assert y.shape == (M, N)
    assert not y.any()
    assert [g.shape for g in torch.autograd.grad(y.sum(), leaves)] == [x.shape, weights.shape]


def test_torchs_grouped_kernel_is_called_as_it_expects(device, monkeypatch):
    """Torch's own function runs on a CPU too, on aligned rows."""
    x, weights, offsets = drawn(device, rows=80, N=24, K=16, dtype=torch.bfloat16)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    y, wanted = of("torch")(*leaves, offsets), by_loop(*leaves, offsets)
    torch.testing.assert_close(y, wanted)
    dy = torch.ones(80, 1, dtype=y.dtype, device=device).expand(80, 24)
    grads = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, leaves, dy), rtol=2e-2, atol=2e-2)


def test_which_form_runs(device, monkeypatch):
    x, _, _ = drawn(device)
    assert module._best(x, 33, 6) == "loop"
    monkeypatch.setattr(module, "is_captured", lambda: True)
    assert module._best(x, 33, 6) == "triton"
    monkeypatch.setattr(module, "_fits_grouped_mm", lambda *_: True)
    assert module._best(x, 33, 6) == "torch"
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(x.numel() * 33))
    assert module._best(x, 33, 6) == "triton"
    assert module._best(x.double(), 33, 6) == "torch"


def test_takes_what_a_loop_takes(device):
    x, weights, offsets = drawn(device)
    wanted = by_loop(x, weights, offsets)
    for given in (offsets.long(), offsets.cpu(), list(ENDS), ENDS):
        torch.testing.assert_close(tw.grouped_linear(x, weights, given), wanted)
    doubles = x.double(), weights.double(), offsets
    torch.testing.assert_close(tw.grouped_linear(*doubles), by_loop(*doubles))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.grouped_linear(x, weights, offsets).dtype == torch.bfloat16
    ours = lambda x: tw.grouped_linear(x, weights, offsets)
    torch.testing.assert_close(torch.func.vmap(ours)(x[None])[0], wanted)
    torch.testing.assert_close(torch.func.jvp(ours, (x,), (x,)), (wanted, wanted))
    with DispatchLog() as log:
        torch.testing.assert_close(tw.grouped_linear(x, weights, offsets), wanted)
    assert "tilewright::grouped_linear" in log.operators


def test_bad_arguments(device):
    x, weights, offsets = drawn(device)
    refused = [
        (
            RuntimeError,
            r"must be of shape \[M, K\] and the weights of shape \[E, N, K\], not",
            (x, weights[0], offsets),
        ),
        (RuntimeError, r"must be of shape \[M, K\] and the weights", (x[:, :3], weights, offsets)),
        (RuntimeError, "must have the same dtype, not", (x.half(), weights, offsets)),
        (RuntimeError, r"must be of shape \[6\], the end of each group, not \(5,\)", (x, weights, offsets[1:])),
        (TypeError, "must be int32 or int64, not torch.float32", (x, weights, offsets.float())),
        (TypeError, "must be int32 or int64, not torch.float32", (x, weights, [1.5, 2, 3, 4, 5, 6])),
        (TypeError, "input must be a tensor, not list", ([1], weights, offsets)),
        (ValueError, r"must ascend from 0, but offsets\[2\] is 4, after 5", (x, weights, [5, 5, 4, 6, 7, 8])),
        (ValueError, r"must ascend from 0, but offsets\[0\] is -1, below 0", (x, weights, [-1, 5, 5, 6, 7, 8])),
        (ValueError, "must not exceed the 70 rows of the input, but the last is 71", (x, weights, [5] * 5 + [71])),
    ]
    for kind, message, args in refused:
        with pytest.raises(kind, match=message):
            tw.grouped_linear(*args)


def test_registered_operators(device):
    x, weights, offsets = drawn(device, (2, 2, 5), N=3, K=4)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    torch.library.opcheck(module.grouped_linear_forward.registered, (*leaves, offsets, "triton"))
    dy = torch.randn(5, 3, device=device, requires_grad=True)
    torch.library.opcheck(module.grouped_weight_gradient.registered, (dy, x, offsets, "triton"))
    assert_compiles(tw.grouped_linear, x.detach(), weights.detach(), offsets)
