"""Laws of the cumulative sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from reduction_laws import FLOATS, forget, inf, nan, same
from reduction_laws import few_programs as few_programs
from support import (
    assert_compiles,
    assert_gradients_match,
    assert_right,
    crossover_at,
    few_examples,
    laid_out,
    layouts,
    shapes,
)
from tilewright.ops.reduce import cumsum as module


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim", "programs"),
    [((300, 9), 1, 4224), ((3, 9001), 1, 4), ((1, 20011), 1, 4224), ((2, 300, 5), 1, 4), ((1001, 3), 0, 16)],
)
def test_every_element_counts_once(dtype, shape, dim, programs, device, few_programs):
    few_programs(programs)
    x = laid_out(shape, "contiguous", device=device, dtype=dtype).mul(2).round()
    same(tw.cumsum(x, dim), x.double().cumsum(dim).to(dtype))
    same(module.cumsum_forward(x, dim, True, None), x.double().flip(dim).cumsum(dim).flip(dim).to(dtype))


@pytest.fixture
def short_parts(monkeypatch):
    """Rows are split into parts of 128 elements, in groups of 4."""
    default = module.CONFIG.default
    config = {"BLOCK_N": 64, "PART": 128, "num_warps": 4}
    monkeypatch.setattr(module.CONFIG, "default", lambda form, *key: config if form == "long" else default(form, *key))
    monkeypatch.setattr(module, "GROUP", 4)
    monkeypatch.setattr(module, "MAX_ROW", 64)
    monkeypatch.setattr(module, "MAX_ODD_ROW", 64)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("M", "N"), [(2, 1024), (1, 2001), (5, 131), (2, 257)])
def test_parts_of_rows_add_up(dtype, M, N, device, short_parts):
    for layout in ("contiguous", "offset"):
        x = laid_out((M, N), layout, device=device, dtype=dtype).mul(2).round()
        same(tw.cumsum(x, 1), x.double().cumsum(1).to(dtype))
        same(module.cumsum_forward(x, 1, True, None), x.double().flip(1).cumsum(1).flip(1).to(dtype))


@pytest.mark.parametrize("few", [0, 4])  # columns that are not split, or split
def test_parts_of_columns_add_up(few, device, monkeypatch):
    monkeypatch.setattr(module, "SCAN_PROGRAMS_PER_SM", 1)
    monkeypatch.setattr(module, "FEW_PROGRAMS_PER_SM", few)
    forget()
    for shape in ((700, 3), (2, 640, 8), (1, 333, 40)):
        x = laid_out(shape, "contiguous", device=device).mul(2).round()
        same(tw.cumsum(x, -2), x.double().cumsum(-2).float())
        same(module.cumsum_forward(x, x.dim() - 2, True, None), x.double().flip(-2).cumsum(-2).flip(-2).float())
    forget()


def test_last_element_is_the_sum_and_differences_are_the_input(device):
    x = laid_out((5, 200), "contiguous", device=device).mul(8).round()
    y = tw.cumsum(x, 1)
    same(y[:, -1], x.sum(1))
    same(y.diff(dim=1), x[:, 1:])


def test_extreme_values(device):
    x = torch.tensor([[1, inf, 2], [inf, -inf, 0], [1, nan, 0], [3e38, 3e38, -3e38]], device=device)
    same(tw.cumsum(x, 1), torch.cumsum(x, 1))
    columns = x[:3].t()  # in order, the sums of the last row overflow
    same(tw.cumsum(columns, 0), torch.cumsum(columns, 0))


@few_examples
@given(shape=shapes, layout=layouts, data=st.data())
def test_any_shape_layout_and_dim(shape, layout, data, device):
    x = laid_out(shape, layout, device=device)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert_right(tw.cumsum(x, dim), lambda x: torch.cumsum(x, dim), x)
    assert_gradients_match(lambda x: tw.cumsum(x, dim), lambda x: torch.cumsum(x, dim), x)


def test_double_backward(device):
    # Small integers: sums in any order are exact.
    x = torch.tensor([[1.0, -1, 0, 1, 1], [-1, 1, 1, 0, -1], [0, 1, -1, -1, 1]], device=device, requires_grad=True)
    found = []
    for fn in (tw.cumsum, torch.cumsum):
        (dx,) = torch.autograd.grad(fn(x.pow(3), 1).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), x))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][0].abs().sum() > 100


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_accepts_what_torch_accepts(shape, device):
    x = torch.ones(shape, device=device)
    for kind in (x, x.double(), x.half(), x.int(), x > 0):
        same(tw.cumsum(kind, -1), torch.cumsum(kind, -1))
    for dtype in (torch.float32, torch.float16, torch.int32):
        same(tw.cumsum(x.half(), 0, dtype=dtype), torch.cumsum(x.half(), 0, dtype=dtype))
        same(tw.cumsum(x, 0, dtype=dtype), torch.cumsum(x, 0, dtype=dtype))


def test_errors_match_torch(device):
    x = torch.randn(4, 3, device=device)
    for bad in ((x, 2), (x, (0,)), (x, None), (3, 0)):
        with pytest.raises((RuntimeError, TypeError, IndexError)) as theirs:
            torch.cumsum(*bad)
        with pytest.raises(theirs.type) as ours:
            tw.cumsum(*bad)
        assert str(ours.value) == str(theirs.value)


def test_autocast_and_functional_transforms_match_torch(device):
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.cumsum(x.half(), -1).dtype == torch.cumsum(x.half(), -1).dtype
    torch.testing.assert_close(torch.func.vmap(lambda x: tw.cumsum(x, 0))(x), x.cumsum(-1))


def test_registered_operator(device):
    x = torch.randn(4, 33, device=device)
    torch.library.opcheck(module.cumsum_forward.registered, (x.clone().requires_grad_(), 1, False, None))
    torch.library.opcheck(module.cumsum_forward.registered, (x.t(), 0, True, torch.float32))
    assert_compiles(lambda x: tw.cumsum(x, 1), x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tw.cumsum(x, 0), fullgraph=True, dynamic=True, backend="aot_eager")
    assert_gradients_match(compiled, lambda x: torch.cumsum(x, 0), x)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(1, 2**31 + 9), (2**16 + 1, 2**15 + 1)])
def test_more_than_2_31_elements(M, N, device):
    x = torch.zeros(M, N, device=device, dtype=torch.float16)
    x[-1, -9:] = torch.arange(9)
    same(tw.cumsum(x, 1)[-1, -9:], x[-1, -9:].cumsum(0))
