"""How softmax's CUDA C++ kernels see a tensor, and how they split its columns. The kernels themselves need a GPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import LAYOUTS, few_examples, laid_out, layouts
from tilewright.ops.softmax._cuda import (
    MAX_COLUMN_THREADS,
    _column_choices,
    _column_default,
    _column_threads,
    view,
)

dims = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def seen(x: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return x as the kernels address it, [outers, N, inners], or the transposed [outers, inners, N]."""
    of = view(x.shape, x.stride(), dim)
    if of is None:
        return None
    found = x.as_strided((of.outers, of.N, of.inners), (of.stride_o, of.stride_n, 1))
    return found.transpose(1, 2) if of.is_transposed else found


def expected(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x contiguous, as [outers, N, inners]."""
    return x.contiguous().view(math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))


@few_examples
@given(shape=dims, layout=layouts)
def test_a_view_addresses_the_elements_in_order(shape, layout):
    x = laid_out(shape, layout, device="cpu")
    for dim in range(x.dim()):
        found = seen(x, dim)
        if found is not None:
            assert torch.equal(found.reshape(-1), expected(x, dim).reshape(-1))


@pytest.mark.parametrize("layout", [*LAYOUTS, "padded"])
def test_views_of_matrices(layout):
    x = laid_out((6, 9), layout, device="cpu")
    of = view(x.shape, x.stride(), 1)
    if layout == "sliced":
        assert of is None, "every other element is not a row"
    else:
        assert of is not None
        assert of.is_transposed == (layout == "transposed")
        assert (of.outers, of.inners) == ((1, 6) if of.is_transposed else (6, 1))


def test_views_of_permuted_tensors():
    x = laid_out((2, 3, 4, 5), "contiguous", device="cpu")
    assert seen(x.transpose(1, 2), 3) is None, "rows at two distances"
    heads = x.transpose(2, 3)
    shapes = {}
    for name, other, dim in (("heads", heads, 3), ("sliced", x[:, :2], 1), ("last", x.permute(0, 2, 3, 1), 3)):
        found = seen(other, dim)
        assert found is not None
        assert torch.equal(found.reshape(-1), expected(other, dim).reshape(-1))
        shapes[name] = tuple(found.shape)
    assert shapes == {"heads": (6, 5, 4), "sliced": (2, 2, 20), "last": (2, 20, 3)}


@pytest.mark.parametrize("kernel", ["columns_fwd", "columns_bwd", "transposed_fwd"])
@pytest.mark.parametrize(("itemsize", "pack"), [(2, 8), (2, 1), (4, 4), (4, 1)])
@pytest.mark.parametrize("N", [1, 5, 33, 1000, 4096, 8200])
def test_columns_are_covered(kernel, itemsize, pack, N):
    choices = _column_choices(kernel, itemsize, pack, N)
    for config in choices:
        split = {name: config[name] for name in ("across", "vectors", "blocks")}
        threads = _column_threads(N, **split)
        assert threads <= MAX_COLUMN_THREADS
        assert threads % 32 == threads % config["across"] == 0
        assert threads // config["across"] * config["vectors"] * config["blocks"] >= N
    if choices or pack * itemsize == 16:
        assert _column_default(kernel, itemsize, pack, N) in choices
