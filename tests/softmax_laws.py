"""Laws of softmax and log_softmax."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from support import assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.ops.softmax import _operators as _softmax

inf, nan = float("inf"), float("nan")
EXTREMES = [
    [1e30, 1e30, 0, 0],
    [-inf, 0, 1, -inf],
    [-1e30, -1e30, -1e30, -1e30],
    [-inf, -inf, -inf, -inf],
    [inf, 0, 0, 0],
    [nan, 0, 0, 0],
]


class SoftmaxLaws:
    """Laws of tw.<op>(input, dim). `formula` is torch's function."""

    module: ModuleType
    call: Callable[..., torch.Tensor]
    formula: Callable[..., torch.Tensor]

    @pytest.fixture(autouse=True)
    def fast_path(self, monkeypatch):
        """The public function uses our kernels for inputs of any size."""
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(0))

    def ours(self, x, dim=-1, **kwargs):
        return type(self).call(x, dim, **kwargs)

    def theirs(self, x, dim=-1, **kwargs):
        return type(self).formula(x, dim, **kwargs)

    def test_extreme_values(self, device):
        x = torch.tensor(EXTREMES, device=device)
        for name, kernel in self.module.op.kernels.items():
            if kernel.language in ("torch", "triton") and name != "compile":
                torch.testing.assert_close(kernel.fn(x), self.theirs(x), equal_nan=True, msg=name)

    def test_double_backward(self, device):
        x = laid_out((3, 5), "contiguous", device=device).requires_grad_()
        (ours,) = torch.autograd.grad(self.ours(x).square().sum(), x, create_graph=True)
        (theirs,) = torch.autograd.grad(self.theirs(x).square().sum(), x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))

    def test_rows_too_long_for_registers(self, device):
        x = laid_out((2, _softmax.MAX_TILE + 3), "contiguous", device=device)
        assert_right(self.ours(x), self.theirs, x)
        assert_gradients_match(self.ours, self.theirs, x)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 3, 4)])
    @pytest.mark.parametrize("dim", [-1, 0])
    def test_accepts_what_torch_accepts(self, shape, dim, device):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(self.ours(x, dim), self.theirs(x, dim))

    def test_errors_dtype_and_autocast_match_torch(self, device):
        x = torch.randn(4, 8, device=device, dtype=torch.float16)
        assert self.ours(x, dtype=torch.float32).dtype == torch.float32
        with torch.autocast(device, dtype=torch.bfloat16):
            assert self.ours(x).dtype == self.theirs(x).dtype
        torch.testing.assert_close(self.ours(x.double()), self.theirs(x.double()))
        with pytest.raises(IndexError) as theirs:
            self.theirs(x, 2)
        with pytest.raises(IndexError) as ours:
            self.ours(x, 2)
        assert str(ours.value) == str(theirs.value)
