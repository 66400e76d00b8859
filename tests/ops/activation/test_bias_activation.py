"""Laws of an activation after a bias."""

from functools import partial

import pytest
import torch

from activation_laws import FLOATS, nan
from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, laid_out
from tilewright.ops.activation import _unary as _activation
from tilewright.ops.activation import bias_activation as module
from tilewright.runtime import elementwise as _flat

every = pytest.mark.parametrize("act", _activation.FORMULAS)


@every
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_sum_is_not_rounded_before_the_activation(act, dtype, device):
    x = torch.full((3, 20), 1.0, device=device, dtype=dtype)
    bias = torch.full((20,), torch.finfo(dtype).eps / 4, device=device, dtype=dtype)
    assert_right(module.public(x, bias, act), module.reference, x, bias, act)
    cancelled = _activation.bias_activation(x, bias - 1, act)
    assert_right(cancelled, module.reference, x, bias - 1, act)


@every
def test_zero_bias_is_neutral_and_nan_stays_in_its_column(act, device):
    x, bias = torch.randn(5, 33, device=device), torch.zeros(33, device=device)
    assert torch.equal(module.public(x, bias, act), _activation.activation(x, act))
    bias[7] = nan
    assert torch.equal(module.public(x, bias, act).isnan().any(0), bias.isnan())
    dx, dbias = _activation.bias_activation_backward(x, bias, x, act)
    assert torch.equal(dbias.isnan() | (torch.arange(33, device=device) == 7), torch.arange(33, device=device) == 7)
    assert torch.equal(dx.isnan().any(0), dbias.isnan())


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (4, 16)])
def test_programs_that_loop_over_rows(rows, columns, device):
    """More rows than a tile, with even and uneven rows and columns."""
    config = {"block": rows * columns, "columns": columns, "programs": 3, "num_warps": 1}
    for M, N in ((37, 50), (37, 64), (24, 50), (24, 64)):
        x, bias = torch.randn(M, N, device=device), torch.randn(N, device=device)
        with _activation.CONFIG.override(("bias-bwd", "silu", 4, "small"), config):
            assert_gradients_match(partial(module.public, act="silu"), partial(module.reference, act="silu"), x, bias)


@pytest.mark.parametrize("M", [16, 21])
def test_more_rows_than_the_grid_limit(M, device, monkeypatch):
    """Tiles of two rows, in a grid of at most three."""
    monkeypatch.setattr(_flat, "MAX_GRID_Y", 3)
    x, bias = torch.randn(M, 512, device=device), torch.randn(512, device=device)
    assert_right(module.public(x, bias, "silu"), module.reference, x, bias, "silu")


def test_the_grid_limit_is_that_of_a_launch():
    for down in (1, 65535, 65536, 10**6):
        across, high, steps = _flat.tile_grid(4 * down - 3, 1000, 4, 256)
        assert (across, steps & (steps - 1)) == (4, 0)
        assert high <= 65535
        assert down <= high * steps < down + steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(9,), (1, 1), (4, 3, 40), (70, 5)])
def test_any_shape_and_layout(shape, layout, device):
    x, bias = laid_out(shape, layout, device=device), laid_out(shape[-1:], "sliced", device=device)
    for act in ("relu", "silu"):
        assert_right(module.public(x, bias, act), module.reference, x, bias, act)
        assert_gradients_match(partial(module.public, act=act), partial(module.reference, act=act), x, bias)


def test_partial_sums_are_added_in_a_fixed_order(device):
    """More rows than programs: each takes several, and the last one fewer."""
    x, dy = torch.randn(2, 5000, 33, device=device)
    bias = torch.randn(33, device=device)
    first, second = (_activation.bias_activation_backward(x, bias, dy, "silu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first[1], first[0].sum(0), rtol=1e-4, atol=1e-4)


@every
def test_double_backward(act, device):
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    bias = torch.randn(5, device=device, requires_grad=True)
    found = []
    for fn in (module.public, module.reference):
        first = torch.autograd.grad(fn(x, bias, act).square().sum(), (x, bias), create_graph=True)
        found.append(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), (x, bias)))
    torch.testing.assert_close(*found)


def test_gradient_of_one_input(device):
    for needs in (0, 1):
        args = [torch.randn(5, 8, device=device), torch.randn(8, device=device)]
        args[needs].requires_grad_()
        module.public(*args, "gelu").sum().backward()
        assert args[needs].grad is not None
        assert args[1 - needs].grad is None


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    bias = torch.randn(shape[-1:], device=device, requires_grad=True)
    y = module.public(x, bias, "silu")
    assert y.shape == shape
    assert [g.tolist() for g in torch.autograd.grad(y.sum(), (x, bias))] == [x.tolist(), [0.0] * shape[-1]]


def test_registered_operators(device):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    bias = torch.randn(33, device=device, requires_grad=True)
    for act in ("relu", "silu"):
        torch.library.opcheck(_activation.bias_activation.registered, (x, bias, act))
    plain = x.detach()
    backward = _activation.bias_activation_backward.registered
    torch.library.opcheck(backward, (plain, None, plain.t().contiguous().t(), "relu"))
    assert_compiles(lambda x, b: _activation.bias_activation(x, b, "silu"), plain, bias.detach())


def test_compiled_code_calls_torch(device):
    x, bias = torch.randn(4, 33, device=device), torch.randn(33, device=device)
    compiled = torch.compile(module.public, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, bias, "gelu"), torch.nn.functional.gelu(x + bias), rtol=0, atol=0)


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    x = torch.zeros(2**16 + 1, 2**15 + 16, device=device, dtype=torch.float16)
    x[-1] = torch.linspace(-3, 3, x.shape[1])
    bias = torch.full((x.shape[1],), 0.5, device=device, dtype=torch.float16)
    torch.testing.assert_close(module.public(x, bias, "silu")[-1], module.reference(x[-1], bias, "silu"))
    dx, _ = _activation.bias_activation_backward(x, bias, x, "relu")
    torch.testing.assert_close(dx[-1], torch.where(x[-1] + bias > 0, x[-1], 0))
