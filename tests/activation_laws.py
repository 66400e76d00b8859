"""Laws of all activations, plain and gated."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.ops.activation import _gated
from tilewright.ops.activation import _unary as _activation
from tilewright.runtime import elementwise as _flat

inf, nan = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EXTREMES = (1e30, -1e30, 6e4, -6e4, 100, -100, 0.0, 1e-40, nan, inf, -inf)


def forbid_launches(monkeypatch) -> None:
    for name in ("_plan", "_plan_bias"):
        monkeypatch.setattr(_activation, name, lambda *_: pytest.fail("our kernel was launched"))


class PlainLaws:
    """Laws of tw.<op>(input). `act` is the name of the activation, `formula` torch's function."""

    module: ModuleType
    act: str
    call: Callable[..., Any]
    formula: Callable[..., Any]

    @pytest.fixture(autouse=True)
    def fast_path(self, monkeypatch):
        """The public function uses our kernels for inputs of any size."""
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(0))

    def ours(self, x, **options):
        return type(self).call(x, **options)

    def expected(self, x):
        return type(self).formula(x)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_extreme_values_and_their_gradients(self, dtype, device):
        x = torch.tensor(EXTREMES, device=device).to(dtype)
        assert_right(_activation.activation(x, self.act), self.expected, x)
        dx = _activation.activation_backward(x, torch.full_like(x, 3), self.act)
        wide = x.double().requires_grad_()
        (truth,) = torch.autograd.grad(self.expected(wide), wide, torch.full_like(wide, 3))
        torch.testing.assert_close(dx, truth.to(dtype), equal_nan=True)

    @pytest.mark.parametrize("N", [2**13, 2**13 + 1])
    @pytest.mark.parametrize("layout", ["contiguous", "offset"])
    def test_even_and_uneven_tiles(self, N, layout, device):
        x = laid_out((N,), layout, device=device, dtype=torch.float16)
        assert_right(self.ours(x), self.expected, x)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(1,), (7, 1, 9), (6, 33)])
    def test_any_shape_and_layout(self, shape, layout, device):
        x = laid_out(shape, layout, device=device)
        got = self.ours(x)
        assert_right(got, self.expected, x)
        assert got.stride() == self.expected(x).stride()
        assert_gradients_match(self.ours, self.expected, x)
        assert_gradients_match(lambda x: _activation.activation(x, self.act), self.expected, x)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
    def test_accepts_what_torch_accepts(self, shape, device):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(self.ours(x), self.expected(x))
        torch.testing.assert_close(self.ours(x.double()), self.expected(x.double()))
        assert _activation.activation(x, self.act).shape == shape

    def test_bias_is_added_first(self, device):
        x, bias = torch.randn(5, 40, device=device), torch.randn(40, device=device)
        torch.testing.assert_close(self.ours(x, bias=bias), self.expected(x + bias))
        torch.testing.assert_close(self.ours(x.double(), bias=bias.double()), self.expected(x.double() + bias.double()))
        with pytest.raises(ValueError, match=r"last dimension, \[40\], not \[41\]"):
            self.ours(x, bias=torch.randn(41, device=device))
        with pytest.raises(TypeError, match="bias must be a tensor, not float"):
            self.ours(x, bias=1.0)

    def test_double_backward(self, device):
        x = torch.randn(3, 5, device=device, requires_grad=True)
        found = []
        for fn in (self.ours, self.expected):
            (dx,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), x))
        torch.testing.assert_close(*found)

    def test_autocast_and_functional_transforms_match_torch(self, device):
        x = torch.randn(4, 8, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert self.ours(x).dtype == self.expected(x).dtype
        torch.testing.assert_close(torch.func.vmap(self.ours)(x), self.expected(x))
        torch.testing.assert_close(torch.func.jvp(self.ours, (x,), (x,)), torch.func.jvp(self.expected, (x,), (x,)))

    def test_small_inputs_go_to_torch(self, device, monkeypatch):
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(9))
        forbid_launches(monkeypatch)
        x = torch.randn(8, device=device)
        torch.testing.assert_close(self.ours(x), self.expected(x), rtol=0, atol=0)

    def test_registered_operators(self, device):
        x = torch.randn(4, 33, device=device)
        torch.library.opcheck(_activation.activation.registered, (x.clone().requires_grad_(), self.act))
        torch.library.opcheck(_activation.activation_backward.registered, (x.t(), x.t(), self.act))
        assert_compiles(lambda x: _activation.activation(x, self.act), x)

    def test_compiled_code_calls_torch(self, device):
        x = torch.randn(4, 33, device=device)
        compiled = torch.compile(self.ours, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), self.expected(x), rtol=0, atol=0)

    @pytest.mark.gpu
    def test_more_than_2_31_elements(self, device):
        x = torch.zeros(2**31 + 9, device=device, dtype=torch.float16)
        x[-9:] = torch.arange(9)
        end = x[-20:].detach().requires_grad_()
        torch.testing.assert_close(_activation.activation(x, self.act)[-20:], self.expected(end).detach())
        (slope,) = torch.autograd.grad(self.expected(end), end, end.detach())
        torch.testing.assert_close(_activation.activation_backward(x, x, self.act)[-20:], slope)


class InplaceLaws(PlainLaws):
    """Laws of tw.<op>(input, inplace=True)."""

    def test_in_place(self, device):
        for bias in (None, torch.randn(9, device=device)):
            x = torch.randn(4, 9, device=device)
            wanted = self.expected(x if bias is None else x + bias)
            version = x._version
            got = self.ours(x, inplace=True, bias=bias)
            assert got is x
            assert x._version > version
            torch.testing.assert_close(x, wanted)

    def test_in_place_with_gradients_goes_to_torch(self, device, monkeypatch):
        forbid_launches(monkeypatch)
        x = torch.randn(4, 9, device=device, requires_grad=True)
        (ours,) = torch.autograd.grad(self.ours(x * 2, inplace=True).sum(), x)
        torch.testing.assert_close(ours, torch.autograd.grad(self.expected(x * 2).sum(), x)[0])
        with pytest.raises(RuntimeError, match="leaf Variable"):
            self.ours(x, inplace=True)
        with torch.inference_mode():
            kept = torch.randn(4, device=device)
        with pytest.raises(RuntimeError, match="inference tensor"):
            self.ours(kept, inplace=True)


class GatedLaws:
    """Laws of tw.<op>(gate, up). `act` is the name of the activation, `formula` torch's function."""

    module: ModuleType
    act: str
    call: Callable[..., Any]
    formula: Callable[..., Any]

    @pytest.fixture(autouse=True)
    def fast_path(self, monkeypatch):
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(0))

    def ours(self, gate, up=None):
        return type(self).call(gate, up)

    def expected(self, gate, up=None):
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return type(self).formula(gate) * up

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_extreme_gates(self, dtype, device):
        gate = torch.tensor(EXTREMES, device=device).to(dtype)
        assert_right(self.ours(gate, torch.ones_like(gate)), self.expected, gate, torch.ones_like(gate))

    def test_up_is_linear_and_packing_changes_nothing(self, device):
        gate, up = torch.randn(2, 7, 24, device=device).unbind()
        torch.testing.assert_close(self.ours(gate, 4 * up), 4 * self.ours(gate, up), rtol=0, atol=0)
        packed = torch.cat([gate, up], -1)
        assert torch.equal(self.ours(packed), self.ours(gate, up))
        assert torch.equal(self.ours(*packed.chunk(2, -1)), self.ours(gate, up))
        assert_gradients_match(lambda packed: self.ours(*packed.chunk(2, -1)), self.expected, packed)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(1,), (5, 1), (3, 2, 9), (6, 32)])
    def test_any_shape_and_layout(self, shape, layout, device):
        gate = laid_out(shape, layout, device=device)
        up = laid_out(shape, "transposed", device=device, seed=1)
        packed = laid_out((*shape[:-1], 2 * shape[-1]), layout, device=device)
        for args in ((gate, gate.flip(0)), (gate, up), (packed,)):
            got = self.ours(*args)
            assert got.is_contiguous()
            assert_right(got, self.expected, *args)
            assert_gradients_match(self.ours, self.expected, *args)

    @pytest.mark.parametrize("M", [16, 21])
    def test_more_rows_than_the_grid_limit(self, M, device, monkeypatch):
        """Tiles of two rows, in a grid of at most three."""
        monkeypatch.setattr(_flat, "MAX_GRID_Y", 3)
        packed = torch.randn(M, 520, device=device)
        assert_right(self.ours(packed), self.expected, packed)
        assert_gradients_match(self.ours, self.expected, packed)

    def test_gradient_of_one_input(self, device):
        gate, up = torch.randn(2, 5, 8, device=device)
        for fixed in (0, 1):
            args = [gate.clone(), up.clone()]
            args[1 - fixed].requires_grad_()
            self.ours(*args).sum().backward()
            assert args[fixed].grad is None
            assert args[1 - fixed].grad is not None

    def test_double_backward(self, device):
        tensors = [torch.randn(3, 6, device=device, requires_grad=True) for _ in range(2)]
        for args in (tensors, tensors[:1]):
            found = []
            for fn in (self.ours, self.expected):
                first = torch.autograd.grad(fn(*args).square().sum(), args, create_graph=True)
                found.append(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), args))
            torch.testing.assert_close(*found)

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
    def test_empty(self, shape, device):
        x = torch.randn(shape, device=device, requires_grad=True)
        for args in ((x, x), (x,)):
            y = self.ours(*args)
            assert y.shape == self.expected(*args).shape
            assert torch.autograd.grad(y.sum(), x)[0].shape == shape

    def test_ineligible_inputs_go_to_torch(self, device):
        gate, up = torch.randn(2, 4, 8, device=device, dtype=torch.float64)
        torch.testing.assert_close(self.ours(gate, up), self.expected(gate, up))
        torch.testing.assert_close(self.ours(gate.float(), up.half()), self.expected(gate.float(), up.half()))
        torch.testing.assert_close(self.ours(gate.float(), up[0].float()), self.expected(gate.float(), up[0].float()))
        torch.testing.assert_close(torch.func.vmap(self.ours)(gate, up), self.expected(gate, up))
        with torch.autocast(device, dtype=torch.bfloat16):
            assert self.ours(gate.float(), up.float()).dtype == self.expected(gate.float(), up.float()).dtype

    def test_errors(self, device):
        with pytest.raises(ValueError, match=r"its last dimension must be even, not that of \[4, 7\]"):
            self.ours(torch.randn(4, 7, device=device))
        with pytest.raises(RuntimeError, match="must match the size"):
            self.ours(torch.randn(4, 7, device=device), torch.randn(4, 8, device=device))

    def test_registered_operators(self, device):
        gate, up = torch.randn(2, 4, 34, device=device)
        for args in ((gate, up), (gate, None), (gate.t(), up.t())):
            leaves = [None if a is None else a.detach().requires_grad_() for a in args]
            torch.library.opcheck(_gated.gated.registered, (*leaves, self.act))
        torch.library.opcheck(_gated.gated_backward.registered, (gate, None, gate[:, ::2], self.act))
        assert_compiles(lambda gate: _gated.gated(gate, None, self.act), gate)

    def test_compiled_code_calls_torch(self, device):
        gate = torch.randn(4, 34, device=device)
        compiled = torch.compile(self.ours, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(gate), self.expected(gate), rtol=0, atol=0)

    @pytest.mark.gpu
    def test_more_than_2_31_elements(self, device):
        x = torch.zeros(2**16 + 1, 2**15 + 16, device=device, dtype=torch.float16)
        x[-1] = torch.linspace(-3, 3, x.shape[1])
        torch.testing.assert_close(self.ours(x)[-1], self.expected(x[-1]))
        torch.testing.assert_close(self.ours(x, x)[-1], self.expected(x[-1], x[-1]))
