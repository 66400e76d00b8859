"""Laws of the variance."""

import pytest
import torch

import tilewright as tw
from reduction_laws import ReductionLaws, registered
from reduction_laws import few_programs as few_programs
from support import assert_gradients_match, crossover_at, laid_out
from tilewright.ops.reduce import var as module
from tilewright.ops.reduce._plans import KINDS, _combine


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.filterwarnings("ignore:var")  # too few degrees of freedom
class TestVar(ReductionLaws):
    module, call, formula = module, tw.var, torch.var

    def ours(self, x, dim=None, keepdim=False, **more):
        return tw.var(x, dim, keepdim=keepdim, **more)

    def expected(self, x, dim=None, keepdim=False):
        return torch.var(x, dim, keepdim=keepdim)


@pytest.mark.parametrize("correction", [0, 1, 2.5])
def test_correction(correction, device):
    x = laid_out((5, 33), "contiguous", device=device)
    torch.testing.assert_close(tw.var(x, 1, correction=correction), torch.var(x, 1, correction=correction))
    assert_gradients_match(
        lambda x: tw.var(x, 1, correction=correction), lambda x: torch.var(x, 1, correction=correction), x
    )


def test_partial_sums_of_a_row_beyond_int32(device):
    counts = torch.tensor([2.0**30, 2.0**30, 2.0**30, 5.0], dtype=torch.float64)
    means, squares = torch.tensor([0.0, 1.0, 5.0, 9.0]), torch.tensor([1e9, 2e9, 3e9, 7.0])
    N = 3 * 2**30 + 5
    y = torch.empty(1, device=device)
    _combine(1, N, 4, 2**30, KINDS["var"], 1.0, y.get_device())(means.to(device), squares.to(device), None, y, y, None)
    mean = (means * counts).sum() / N
    wanted = (squares + counts * (means - mean) ** 2).sum() / (N - 1)
    torch.testing.assert_close(y.cpu(), wanted.float().view(1))


def test_large_mean(device):
    """E[x²] - E[x]² would cancel to zero."""
    for shape, dim in (((3, 200), 1), ((3, 20000), 1), ((2000, 3), 0)):
        x = laid_out(shape, "contiguous", device=device) + 10000
        torch.testing.assert_close(tw.var(x, dim), x.double().var(dim).float(), rtol=1e-4, atol=0)
        x[0, 0] = 1e8
        torch.testing.assert_close(tw.var(x, dim), x.double().var(dim).float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [64, 100, 4096, 20000])
def test_variance_of_equal_numbers_is_zero(N, dtype, device, few_programs):
    """For any value, even if the sum overflows."""
    one = laid_out((256, 1), "contiguous", device=device, dtype=dtype)
    one[0] = torch.finfo(dtype).max
    assert torch.equal(tw.var(one.repeat(1, N), 1), torch.zeros(256, dtype=dtype, device=device))


def test_overflowing_sum(device, few_programs):
    few_programs(64)
    for shape, dim in (((3, 200), 1), ((3, 20000), 1), ((2000, 3), 0)):
        x = torch.full(shape, 1e37, device=device)
        assert tw.var(x, dim).tolist() == [0.0] * 3
        x[0, 0] = 3e38
        assert tw.var(x, dim)[0] == float("inf")


@pytest.mark.filterwarnings("ignore:var")  # no rows
def test_registered_operators(device):
    registered("var", device, 1.0)


@pytest.mark.parametrize("dim", [-1, (0, 1)])
def test_too_few_degrees_of_freedom_warn_as_torch(dim, device):
    x = torch.ones(1, 1, device=device)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        assert tw.var(x, dim).isnan().all()
    with pytest.warns(UserWarning, match="degrees of freedom"):
        tw.var(x.expand(2, 2).clone(), dim, correction=5)
