"""Laws of softmax, for every kernel."""

import pytest
import torch
from hypothesis import given

import tilewright as tw
from softmax_laws import SoftmaxLaws
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
from tilewright.ops.softmax import _operators as _softmax
from tilewright.ops.softmax import softmax as module
from tilewright.ops.softmax._operators import Softmax

FORMS = [name for name, kernel in module.op.kernels.items() if kernel.language in ("torch", "triton")]
FORMS.remove("compile")


class TestSoftmax(SoftmaxLaws):
    module, call, formula = module, tw.softmax, torch.softmax


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.parametrize("form", FORMS)
def test_rows_sum_to_one_and_shifts_are_neutral(form, device):
    x = laid_out((5, 300), "contiguous", device=device)
    y = module.op.kernels[form].fn(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(5, device=device))
    torch.testing.assert_close(module.op.kernels[form].fn(x + 50), y, rtol=1e-4, atol=1e-7)


@few_examples
@given(shape=shapes, layout=layouts)
def test_any_shape_and_layout(shape, layout, device, fast_path):
    x = laid_out(shape, layout, device=device)
    assert_right(tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, device, fast_path):
    x = laid_out((6, 33), layout, device=device)
    assert_gradients_match(lambda x: tw.softmax(x, dim=1), lambda x: torch.softmax(x, 1), x)


@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("shape", [(5, 33, 70), (3, 700, 40)])
def test_any_dimension(shape, dim, device, fast_path):
    """Columns that fit in one program, and longer ones."""
    x = laid_out(shape, "contiguous", device=device)
    assert_right(tw.softmax(x, dim), lambda x: torch.softmax(x, dim), x)
    assert_gradients_match(lambda x: tw.softmax(x, dim), lambda x: torch.softmax(x, dim), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [1, 7, 1000, 4096, 50257, 131071, 262144])
@pytest.mark.parametrize("log", [False, True])
def test_clusters_with_any_row(N, dtype, log, device):
    """Short and long rows, odd and even lengths, aligned and unaligned memory."""
    of_torch = torch.log_softmax if log else torch.softmax
    for layout in ("contiguous", "offset"):
        x = laid_out((3, N), layout, device=device, dtype=dtype)
        cluster = lambda x: module.softmax_forward(x, Softmax(-1, log, "cluster"))
        assert_right(cluster(x), lambda x: of_torch(x, -1), x)
        assert_gradients_match(cluster, lambda x: of_torch(x, -1), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [8, 12, 24, 1000])
def test_rows_of_whole_vectors(N, dtype, device, fast_path):
    """The length is a multiple of a vector, but not of 16 elements, which Triton would see."""
    x = laid_out((3, N), "contiguous", device=device, dtype=dtype)
    assert_right(tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)
    assert_gradients_match(lambda x: tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)


ROWS = [1, 3, 17, 33, 96, 127, 200, 257, 781, 1000, 1023, 1544, 2047, 2560, 3001, 5120, 11008, 20001, 50257, 131071]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", ROWS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "padded"])
def test_rows_of_any_length_and_layout(N, dtype, layout, device, fast_path):
    x = laid_out((5, N), layout, device=device, dtype=dtype)
    assert_right(tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)
    assert_gradients_match(lambda x: tw.softmax(x, -1), lambda x: torch.softmax(x, -1), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 700, 40), (2, 33, 70), (7, 300, 3), (1, 4099, 24), (300, 2, 16)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "padded"])
def test_columns_of_any_length_and_layout(shape, dtype, layout, device, fast_path):
    x = laid_out(shape, layout, device=device, dtype=dtype)
    for dim in (0, 1):
        assert_right(tw.softmax(x, dim), lambda x, dim=dim: torch.softmax(x, dim), x)
        assert_gradients_match(lambda x, dim=dim: tw.softmax(x, dim), lambda x, dim=dim: torch.softmax(x, dim), x)
    swapped = x.transpose(1, 2)
    assert_right(tw.softmax(swapped, -1), lambda x: torch.softmax(x, -1), swapped)


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    x = torch.zeros(2**15 + 1, 2**16, device=device, dtype=torch.float16)
    x[-1] = torch.arange(2**16, device=device) / 2**12
    for form in ("online", "cluster"):
        torch.testing.assert_close(module.softmax_forward(x, Softmax(-1, form=form))[-1], torch.softmax(x[-1], -1))
    x = x.view(-1, 2**10)
    torch.testing.assert_close(module.softmax_forward(x, Softmax(-1, form="tile"))[-1], torch.softmax(x[-1], -1))


def test_functional_transforms_match_torch(device, fast_path):
    x = torch.randn(4, 8, device=device)
    over_rows = torch.func.vmap(lambda row: tw.softmax(row, -1))
    torch.testing.assert_close(over_rows(x), torch.softmax(x, -1))
    ours = torch.func.jvp(lambda x: tw.softmax(x, -1), (x,), (x,))
    torch.testing.assert_close(ours, torch.func.jvp(lambda x: torch.softmax(x, -1), (x,), (x,)))


def test_registered_operators(device, fast_path):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    torch.library.opcheck(module.softmax_forward.registered, (x, -1, False, "best"))
    torch.library.opcheck(module.softmax_forward.registered, (x.detach().t(), 0, True, "online"))
    torch.library.opcheck(_softmax.softmax_backward.registered, (x.detach(), x.detach(), -1, False, "best", 1.0))
    torch.library.opcheck(module.three_pass_forward.registered, (x,))
    assert_compiles(lambda x: tw.softmax(x, -1), x.detach())


def test_compiles_for_any_size(device, fast_path):
    compiled = torch.compile(lambda x: tw.softmax(x, -1).sum(0), fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 9, 40):
        x = torch.randn(3, size, device=device, requires_grad=True)
        (dx,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (wanted,) = torch.autograd.grad(torch.softmax(x, -1).sum(0).square().sum(), x)
        torch.testing.assert_close(dx, wanted)
