"""Laws of all reductions."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewright as tw
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
from tilewright.ops.reduce import _operators as _reduce
from tilewright.ops.reduce import _plans
from tilewright.runtime import configs as _tuned

inf, nan = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EXTREMES = [
    [inf, 1, 2],
    [inf, -inf, 0],
    [nan, 0, 0],
    [1, nan, inf],
    [-0.0, -0.0, -0.0],
    [-inf, -inf, -inf],
    [inf, 1, inf],
]
# Each law runs in several classes.
few_of_each = settings(few_examples, max_examples=6, suppress_health_check=list(HealthCheck))


@pytest.fixture
def few_programs(monkeypatch):
    """A function that sets how many programs, or rows, fill the GPU: fewer rows are split, however short they are."""

    def fill(programs: int, rows: int | None = None) -> None:
        monkeypatch.setattr(_plans, "max_programs", lambda gpu: programs)
        monkeypatch.setattr(_plans, "many_rows", lambda gpu: programs // 4 if rows is None else rows)
        monkeypatch.setattr(_plans, "MAX_TILE", 512)
        monkeypatch.setattr(_plans, "MAX_ODD_TILE", 2048)
        monkeypatch.setattr(_plans, "MAX_PARTS", 4)
        monkeypatch.setattr(_plans, "PARTS_PER_STEP", 4)
        monkeypatch.setattr(_plans, "column_programs", lambda gpu: programs // 4)
        monkeypatch.setattr(_plans, "MIN_SPAN", 64)
        monkeypatch.setattr(_plans.LONG, "default", lambda *_: {"BLOCK_N": 512, "num_warps": 4})
        forget()

    yield fill
    monkeypatch.undo()
    forget()


def forget() -> None:
    _tuned.ConfigTable._best.cache_clear()
    _tuned.clear_plans()


CONTIGUOUS = torch.Tensor.contiguous


def _must_be_small(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous() or x.numel() <= 108, "copies the input"
    return CONTIGUOUS(x)


def same(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


class ReductionLaws:
    """Laws of tw.<op>(input, dim, keepdim). `formula` is torch's function; `values` maps normal numbers to inputs."""

    module: ModuleType
    call: Callable[..., Any]
    formula: Callable[..., Any]
    dims = "any"  # or "one"
    has_gradients = True
    has_dtype = False

    @pytest.fixture(autouse=True)
    def fast_path(self, monkeypatch):
        """The public function uses our kernels for inputs of any size."""
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(0))

    def ours(self, x, *args, **kwargs):
        return type(self).call(x, *args, **kwargs)

    def expected(self, x, *args, **kwargs):
        return type(self).formula(x, *args, **kwargs)

    def values(self, x):
        return x

    def close(self, got, x, *args):
        if got.is_floating_point():
            assert_right(got, lambda x: self.expected(x, *args), x)
        else:
            same(got, self.expected(x, *args))

    @pytest.mark.parametrize(
        ("shape", "dim", "programs"),
        [
            ((300, 9), 1, 4224),  # short rows, several per program
            ((256, 64), 1, 4224),  # even tiles
            ((200, 64), 1, 4224),  # tiles with uneven rows
            ((3, 1500), 1, 4),  # long rows, one program each
            ((1, 5003), 1, 2),  # one long row, split into parts of several blocks
            ((2, 4096), 1, 4224),  # one part per block or tiles, put together by fours
            ((3, 1536), 1, 4224),  # three parts
            ((2, 61, 5), 1, 4),  # columns
            ((1001, 3), 0, 16),  # split columns
        ],
    )
    def test_every_element_counts_once(self, shape, dim, programs, device, few_programs):
        few_programs(programs)
        for layout, dtype in (("contiguous", torch.float32), ("offset", torch.bfloat16)):
            x = self.values(laid_out(shape, layout, device=device)).to(dtype)
            self.close(self.ours(x, dim), x, dim)

    def test_results_are_deterministic(self, device, few_programs):
        few_programs(16)
        x = self.values(laid_out((2, 5003), "contiguous", device=device))
        same(self.ours(x, 1), self.ours(x.clone(), 1))

    @pytest.mark.parametrize("programs", [2, 4224])
    def test_extreme_values(self, programs, device, few_programs):
        few_programs(programs)
        x = torch.tensor(EXTREMES, device=device)
        torch.testing.assert_close(self.ours(x, -1), self.expected(x, -1), equal_nan=True)
        torch.testing.assert_close(self.ours(x.t(), 0), self.expected(x.t(), 0), equal_nan=True)
        long = torch.cat((x, x[:, 1:2].expand(-1, 1100)), dim=-1)
        torch.testing.assert_close(self.ours(long, -1), self.expected(long, -1), equal_nan=True)

    @few_of_each
    @given(shape=shapes, layout=layouts, data=st.data())
    def test_any_shape_layout_and_dims(self, shape, layout, data, device):
        x = self.values(laid_out(shape, layout, device=device))
        rank = len(shape)
        some = st.lists(st.integers(-rank, rank - 1), min_size=1, max_size=rank, unique_by=lambda d: d % rank)
        one = st.integers(-rank, rank - 1)
        dim = data.draw(one if self.dims == "one" else one | some.map(tuple))
        keepdim = data.draw(st.booleans())
        got = self.ours(x, dim, keepdim=keepdim)
        assert got.shape == self.expected(x, dim, keepdim=keepdim).shape
        self.close(got, x, dim, keepdim)
        if self.has_gradients:
            assert_gradients_match(
                lambda x: self.ours(x, dim, keepdim=keepdim), lambda x: self.expected(x, dim, keepdim=keepdim), x
            )

    def test_gradients_of_long_rows_and_columns(self, device):
        if not self.has_gradients:
            pytest.skip("no gradients")
        for shape, dim in (((2, 5001), 1), ((2, 601, 9), 1)):
            x = self.values(laid_out(shape, "contiguous", device=device))
            assert_gradients_match(lambda x, dim=dim: self.ours(x, dim), lambda x, dim=dim: self.expected(x, dim), x)

    @pytest.mark.parametrize("dim", [(0, 2), (3, 0, 1)])
    def test_non_adjacent_dimensions(self, dim, device):
        if self.dims == "one":
            pytest.skip("takes one dimension")
        x = self.values(laid_out((2, 3, 4, 5), "contiguous", device=device, dtype=torch.bfloat16))
        for keepdim in (True, False):
            got = self.ours(x, dim, keepdim=keepdim)
            assert (got.shape, got.dtype) == (self.expected(x, dim, keepdim=keepdim).shape, x.dtype)
            self.close(got, x, dim, keepdim)
        x = x.float().requires_grad_()
        found = []
        for fn in (self.ours, self.expected):
            (dx,) = torch.autograd.grad(fn(x, dim).square().sum(), x)
            (again,) = torch.autograd.grad(fn(x, dim).square().sum(), x, create_graph=True)
            found.append((dx, again.detach(), *torch.autograd.grad(again.square().sum(), x)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("shape", "dim", "programs"),
        [
            ((9, 40, 6), (0, 2), 8),  # neighboring columns of a result are combined later
            ((61, 3, 7), (0, 2), 4),  # rows that are read several at a time, and some after them
            ((40, 3, 300), (0, 2), 16),  # one program takes the neighboring columns of a result
            ((2, 33, 3, 260), (1, 3), 64),
            ((3, 50, 4, 7), (1, 3), 8),
            ((2, 3, 2, 3, 2), (0, 2, 4), 8),
            ((2, 3, 2, 3, 5), (0, 2), 8),  # more alternations than a kernel takes
        ],
    )
    def test_alternating_dimensions(self, shape, dim, programs, device, few_programs):
        if self.dims == "one":
            pytest.skip("takes one dimension")
        few_programs(programs)
        for layout, dtype in (("contiguous", torch.float32), ("offset", torch.bfloat16)):
            x = self.values(laid_out(shape, layout, device=device)).to(dtype)
            self.close(self.ours(x, dim), x, dim)
        x = self.values(laid_out(shape, "contiguous", device=device))
        assert_gradients_match(lambda x: self.ours(x, dim), lambda x: self.expected(x, dim), x)

    @pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0)])
    def test_a_tensor_is_reduced_in_the_order_of_its_memory(self, order, device, monkeypatch):
        x = self.values(laid_out((5, 12, 9), "contiguous", device=device)).permute(order)
        wanted = [self.expected(x, dim, keepdim=keepdim) for dim in (0, 1, 2) for keepdim in (False, True)]
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "contiguous", _must_be_small)
            found = [self.ours(x, dim, keepdim=keepdim) for dim in (0, 1, 2) for keepdim in (False, True)]
        for got, expected in zip(found, wanted, strict=True):
            assert got.is_contiguous()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        if self.has_gradients:
            assert_gradients_match(lambda x: self.ours(x, 1), lambda x: self.expected(x, 1), x)

    @pytest.mark.parametrize(
        ("shape", "programs"),
        [((70, 24), 4224), ((3, 1500), 4), ((2, 1024), 4224), ((61, 40), 8), ((5, 7, 16), 4224), ((6, 9), 4224)],
    )
    def test_rows_of_a_wider_tensor_are_not_copied(self, shape, programs, device, few_programs, monkeypatch):
        few_programs(programs)
        for dtype in (torch.float32, torch.bfloat16):
            x = self.values(laid_out(shape, "contiguous", device=device)).to(dtype)
            wide = torch.full((*shape[:-1], shape[-1] + 8), nan, device=device, dtype=dtype)
            wide[..., : shape[-1]] = x
            for dim in (-1, -2):
                with monkeypatch.context() as patch:
                    patch.setattr(torch.Tensor, "contiguous", None)
                    got = self.ours(wide[..., : shape[-1]], dim)
                self.close(got, x, dim)

    def test_tensors_that_would_be_copied_go_to_torch(self, device):
        x = self.values(laid_out((6, 9), "contiguous", device=device))
        for layout in (x.repeat_interleave(2, dim=1)[:, ::2], x[:1].expand(6, 9)):
            with tw.trace() as calls:
                got = self.ours(layout, -1)
            self.close(got, layout.contiguous(), -1)
            assert bool(calls[0].kernels) == (type(self).call is tw.logsumexp)

    def test_double_backward(self, device):
        if not self.has_gradients:
            pytest.skip("no gradients")
        x = self.values(laid_out((3, 4, 5), "contiguous", device=device)).requires_grad_()
        for dim in (-1, 1):
            found = []
            for fn in (self.ours, self.expected):
                (dx,) = torch.autograd.grad(fn(x.pow(3), dim).square().sum(), x, create_graph=True)
                found.append(torch.autograd.grad(dx.square().sum(), x))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 3, 4)])
    @pytest.mark.parametrize("dim", [-1, 0, (), None])
    def test_accepts_what_torch_accepts(self, shape, dim, device):
        if self.dims == "one" and self.has_dtype and dim in ((), None):
            pytest.skip("torch does not accept these explicitly")
        x = torch.ones(shape, device=device)
        kinds = [x, x.double(), x.half(), x.int(), x > 0]
        for kind in kinds:
            self.alike(lambda fn, kind=kind: fn(kind, dim))
        for dtype in (torch.float32, torch.float16, torch.int32) if self.has_dtype else ():
            self.alike(lambda fn, dtype=dtype: fn(x.half(), dim, dtype=dtype))
            self.alike(lambda fn, dtype=dtype: fn(x, dim, dtype=dtype))

    def test_errors_match_torch(self, device):
        x = torch.randn(4, 3, device=device)
        for bad in ((x, 2), (x, -3), (x, (0, 0)), (x, (-1, 1)), (x, "rows"), (x, 0.5), (3, 0)):
            self.alike(lambda fn, bad=bad: fn(*bad))

    def alike(self, ask) -> None:
        """Assert that both give the same result or the same error."""
        try:
            wanted = ask(self.expected)
        except (RuntimeError, TypeError, IndexError) as theirs:
            with pytest.raises(type(theirs)) as ours:
                ask(self.ours)
            # torch prints the arguments of a call that matches no overload; ours passes them all by name.
            assert str(ours.value) == str(theirs) or type(theirs) is TypeError  # noqa: PT017
        else:
            torch.testing.assert_close(ask(self.ours), wanted, equal_nan=True)

    def test_autocast_and_functional_transforms_match_torch(self, device):
        x = self.values(torch.randn(4, 8, device=device))
        with torch.autocast(device, dtype=torch.bfloat16):
            assert self.ours(x.half(), -1).dtype == self.expected(x.half(), -1).dtype
        torch.testing.assert_close(torch.func.vmap(lambda x: self.ours(x, 0))(x), self.expected(x, -1))
        if self.has_gradients:
            ours = torch.func.jvp(lambda x: self.ours(x, -1), (x,), (x,))
            torch.testing.assert_close(ours, torch.func.jvp(lambda x: self.expected(x, -1), (x,), (x,)))

    def test_small_inputs_go_to_torch(self, device, monkeypatch):
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(33))
        x = self.values(torch.randn(4, 8, device=device))
        same(self.ours(x, -1), self.expected(x, -1))

    def test_out_argument_matches_torch(self, device):
        if "out" not in inspect.signature(type(self).call).parameters:
            pytest.skip("torch has no out argument")
        x = self.values(torch.randn(4, 8, device=device))
        place = torch.empty(0, device=device)
        assert self.ours(x, -1, out=place) is place
        same(place, self.expected(x, -1))

    def test_compiles(self, device):
        x = self.values(torch.randn(4, 33, device=device))
        if not self.has_gradients:
            assert_compiles(lambda x: self.ours(x, -1), x)
        else:
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: self.ours(x, 0), fullgraph=True, dynamic=True, backend="aot_eager")
            assert_gradients_match(compiled, lambda x: self.expected(x, 0), x)

    @pytest.mark.gpu
    @pytest.mark.parametrize(("M", "N"), [(1, 2**31 + 9), (2**25 + 1, 65), (2**16 + 1, 2**15 + 1)])
    def test_more_than_2_31_elements(self, M, N, device):
        x = torch.ones(M, N, device=device, dtype=torch.float16)
        x[-1, -9:] = torch.arange(9) / 8
        torch.testing.assert_close(self.ours(x, -1)[-1], self.expected(x[-1].float(), -1).to(self.ours(x, -1).dtype))


class ExtremumLaws(ReductionLaws):
    """Laws of amax and amin, and of max and min over a dimension, which return indices too."""

    with_index: Callable[..., Any]
    formula_with_index: Callable[..., Any]

    @pytest.mark.parametrize(
        ("shape", "dims"),
        [((6, 9), None), ((6, 9), 0), ((8, 16), 1), ((2, 20001), 1), ((3, 700, 2), 1), ((3, 40, 3), (0, 2))],
        ids=["all", "columns", "filled", "pieces", "cut columns", "apart"],
    )
    def test_equal_elements_share_the_gradient(self, shape, dims, device):
        x = laid_out(shape, "contiguous", device=device).round()
        args = () if dims is None else (dims,)
        assert_gradients_match(lambda x: self.ours(x, *args), lambda x: self.expected(x, *args), x)

    @pytest.mark.parametrize("dim", [-1, 0, 1])
    def test_values_and_indices_over_a_dimension(self, dim, device):
        ours, theirs = type(self).with_index, type(self).formula_with_index
        for x in (laid_out((3, 700, 2), "contiguous", device=device).round(), torch.tensor(EXTREMES, device=device)):
            got, wanted = ours(x, dim), theirs(x, dim)
            assert type(got) is type(wanted)
            same(got.values, wanted.values)
            same(got.indices, wanted.indices)
            same(ours(x, dim=dim, keepdim=True), theirs(x, dim=dim, keepdim=True))

    def test_gradients_of_values_over_a_dimension(self, device):
        ours, theirs = type(self).with_index, type(self).formula_with_index
        x = laid_out((3, 7, 5), "sliced", device=device)
        for dim in (0, 1, 2):
            assert_gradients_match(lambda x, dim=dim: ours(x, dim)[0], lambda x, dim=dim: theirs(x, dim)[0], x)
        x = laid_out((3, 7), "contiguous", device=device).requires_grad_()
        found = []
        for fn in (ours, theirs):
            (dx,) = torch.autograd.grad(fn(x.pow(3), 1)[0].sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.sum(), x))
        torch.testing.assert_close(*found)


def registered(kind: str, device: str, p: float = 0.0) -> None:
    """Run torch.library.opcheck on the operators of a reduction."""
    x = torch.rand(4, 33, device=device, requires_grad=True)
    torch.library.opcheck(_reduce.reduce_forward.registered, (x, [1], False, kind, p, None))
    if kind in _reduce.KEPT_FOR_BACKWARD:
        torch.library.opcheck(_reduce.reduce_keeping.registered, (x, [1], True, kind, p, torch.float32))
        torch.library.opcheck(_reduce.reduce_keeping.registered, (x.detach()[:0], [1], False, kind, p, None))
