"""Laws of unique."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import assert_compiles, crossover_at, few_examples, laid_out, layouts, shapes
from tilewright.ops.reduce import unique as module
from tilewright.runtime import configs as _tuned

inf, nan = float("inf"), float("nan")
KINDS = (*module.NARROW, *module.WIDE)
OPTIONS = [
    {"return_inverse": inverse, "return_counts": counts}
    for inverse, counts in itertools.product((False, True), (False, True))
]
ALL = OPTIONS[-1]


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    """The public function uses our kernels for inputs of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
    monkeypatch.setattr(module, "COUNT_CROSSOVER", crossover_at(0))


@pytest.fixture
def forms(monkeypatch):
    """The forms that the kernels used."""
    seen = []
    best = module.CONFIG.default

    def default(gpu, form, size):
        seen.append(form)
        return best(gpu, form, size)

    monkeypatch.setattr(module.CONFIG, "default", default)
    _tuned.ConfigTable._best.cache_clear()
    yield seen
    _tuned.ConfigTable._best.cache_clear()


def test_16_bit_counts_without_inverse_go_to_torch(forms, monkeypatch, device):
    monkeypatch.setattr(module, "COUNT_CROSSOVER", crossover_at(math.inf))
    x = whole(1000, scale=100, dtype=torch.int16, device=device)
    same(tw.unique(x, return_counts=True), torch.unique(x, return_counts=True))
    assert forms == []
    same(tw.unique(x, **ALL), torch.unique(x, **ALL))
    assert forms


def same(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def whole(*shape, scale, dtype, device):
    """Return integers, of both signs if the dtype is signed."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(scale).round()
    return (x.abs() % 251 if dtype is torch.uint8 else x).to(dtype).to(device)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_values_inverse_and_counts(dtype, device, forms):
    x = whole(41, 61, scale=20, dtype=dtype, device=device)
    values, inverse, counts = tw.unique(x, **ALL)
    assert (values.dtype, inverse.dtype, counts.dtype) == (dtype, torch.int64, torch.int64)
    assert inverse.shape == x.shape
    assert (values[1:] > values[:-1]).all()
    same(values[inverse], x)
    same(torch.bincount(inverse.flatten()), counts)
    assert counts.sum() == x.numel()
    assert forms == ["histogram" if dtype.itemsize == 1 or dtype in module.WIDE else "count", "inverse"]
    for options in OPTIONS:
        same(tw.unique(x, **options), torch.unique(x, **options))


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS[::3], ids=["seen", "count"])
def test_every_value(dtype, options, device):
    bits = torch.randperm(2**16, generator=torch.Generator().manual_seed(0)).sub(2**15).short().to(device)
    x = bits.view(dtype)
    x = x if dtype is torch.int16 else x[x == x]
    same(tw.unique(x, **options), torch.unique(x, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_zeros_are_equal_and_nans_are_distinct(dtype, device):
    for numbers in (
        [0.0, -0.0, 1, -1],
        [-0.0, 0.0, -0.0],
        [inf, -inf, 1, inf],
        [nan],
        [nan, 1, nan, -inf, nan, 1, inf],
    ):
        x = torch.tensor(numbers, device=device, dtype=dtype)
        for options in OPTIONS[::3]:
            same(tw.unique(x, **options), torch.unique(x, **options))
    other = torch.tensor([-1, 0x7FFF, 0], dtype=torch.int16, device=device).view(dtype)  # NaNs with other bits
    same(tw.unique(other).isnan().sum(), torch.unique(other).isnan().sum())


@pytest.mark.parametrize(
    ("x", "form"),
    [
        (torch.arange(3000) // 7 - 2**40, "count"),
        (torch.arange(3000) % 200 + 2**40, "histogram"),
        (torch.full((5000,), -(2**63)), "histogram"),
        (torch.tensor([2**63 - 1, 2**63 - 60000] * 9), "count"),
        (torch.tensor([2**31 - 1, 2**31 - 300], dtype=torch.int32), "count"),
        (torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32), None),
        (torch.tensor([-(2**63), 2**63 - 1, 0, 0]), None),
        (torch.arange(3000).mul(1000), None),
    ],
)
def test_wide_integers_in_a_narrow_range(x, form, device, forms):
    x = x.to(device)
    same(tw.unique(x, **ALL), torch.unique(x, **ALL))
    assert (not forms) if form is None else forms[0] == form


@pytest.mark.parametrize(("dtype", "counts"), [(torch.int16, False), (torch.int16, True), (torch.uint8, True)])
def test_many_programs_and_copies(dtype, counts, device, monkeypatch):
    """Several blocks per program, several programs per copy, and more copies than are summed at a time."""
    monkeypatch.setattr(module, "MAX_COPIES", 4)
    x = whole(40007, scale=9, dtype=dtype, device=device)
    config = {"BLOCK_N": 512, "programs": 10, "num_warps": 4}
    key = ("histogram" if dtype is torch.uint8 else "count" if counts else "seen", dtype.itemsize)
    with module.CONFIG.override(key, config):
        same(tw.unique(x, return_counts=counts), torch.unique(x, return_counts=counts))
    wide = x.long() * 10  # a few hundred bins, in four copies
    with module.CONFIG.override(("count", 8), config):
        same(tw.unique(wide, **ALL), torch.unique(wide, **ALL))


@pytest.mark.slow
@few_examples
@given(shape=shapes | st.just(()), layout=layouts, dtype=st.sampled_from(KINDS), options=st.sampled_from(OPTIONS))
def test_any_shape_and_layout(shape, layout, dtype, options, device):
    x = laid_out(shape, layout, device=device).abs().mul(2).round().to(dtype)
    same(tw.unique(x, **options), torch.unique(x, **options))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float32], ids=str)
def test_empty(shape, dtype, device):
    x = torch.empty(shape, device=device, dtype=dtype)
    for options in OPTIONS:
        same(tw.unique(x, **options), torch.unique(x, **options))
    same(module.unique_forward(x, True, True), torch.unique(x, **ALL))


def test_accepts_what_torch_accepts(device):
    x = whole(5, 7, scale=2, dtype=torch.int64, device=device)
    for dim in (0, 1, -1):
        same(tw.unique(x, dim=dim, **ALL), torch.unique(x, dim=dim, **ALL))
    for other in (x.float(), x.double(), x.float() / 0):
        same(tw.unique(other, **ALL), torch.unique(other, **ALL))
    same(tw.unique(x, False, True, False), torch.unique(x, True, True, False))
    same(tw.unique(input=x, sorted=False), torch.unique(x))
    with torch.autocast(device, dtype=torch.bfloat16):
        same(tw.unique(x.half()), torch.unique(x.half()))


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (3, {}),
        ([1, 2], {}),
        (torch.ones(3), {"dim": 1}),
        (torch.ones(3), {"dim": 0.5}),
        (torch.ones(3).short(), {"sorted": "no"}),
    ],
)
def test_errors_match_torch(x, options, device):
    x = x.to(device) if isinstance(x, torch.Tensor) else x
    with pytest.raises((TypeError, IndexError, RuntimeError)) as theirs:
        torch.unique(x, **options)
    with pytest.raises(theirs.type) as ours:
        tw.unique(x, **options)
    # torch prints the arguments of a call that matches no overload.
    assert str(ours.value) == str(theirs.value) or theirs.type is TypeError


def test_has_no_gradient(device):
    x = torch.tensor([1.0, 2.0, 1.0], device=device, dtype=torch.bfloat16, requires_grad=True)
    got = tw.unique(x)
    assert got.requires_grad
    with pytest.raises(NotImplementedError, match="derivative"):
        got.sum().backward()
    with torch.no_grad():
        same(tw.unique(x), torch.unique(x))


def test_functional_transforms_match_torch(device):
    x = torch.ones(3, 4, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as theirs:
        torch.func.vmap(torch.unique)(x)
    with pytest.raises(RuntimeError) as ours:
        torch.func.vmap(tw.unique)(x)
    assert str(ours.value) == str(theirs.value)


def test_small_inputs_go_to_torch(device, monkeypatch, forms):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(33))
    x = whole(32, scale=2, dtype=torch.int8, device=device)
    same(tw.unique(x), torch.unique(x))
    assert not forms


def test_results_own_no_more_memory_than_they_need(device):
    values, inverse, counts = tw.unique(whole(1000, scale=3, dtype=torch.bfloat16, device=device), **ALL)
    assert [t.untyped_storage().nbytes() for t in (values, inverse, counts)] == [
        t.nbytes for t in (values, inverse, counts)
    ]


@pytest.mark.parametrize("options", [(True, True), (False, False)])
def test_registered_operator(options, device):
    for dtype in (torch.bfloat16, torch.int64):
        x = whole(4, 33, scale=3, dtype=dtype, device=device)
        torch.library.opcheck(module.unique_forward.registered, (x, *options))


def test_compiles(device):
    x = whole(4, 33, scale=3, dtype=torch.bfloat16, device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_compiles(lambda x: tw.unique(x * 2, **ALL), x)
        assert_compiles(lambda x: tw.unique(x.long()) + 1, x)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: tw.unique(x, **ALL), fullgraph=True, dynamic=True, backend="aot_eager")
        for size in (33, 35):
            x = whole(3, size, scale=3, dtype=torch.int16, device=device)
            same(compiled(x), torch.unique(x, **ALL))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int32], ids=str)
def test_more_than_2_31_elements(dtype, device):
    x = torch.zeros(2**31 + 9, device=device, dtype=dtype)
    x[-9:] = torch.arange(9)
    values, counts = tw.unique(x, return_counts=True)
    same(values, torch.arange(9, device=device, dtype=dtype))
    assert counts.tolist() == [2**31 + 1, *[1] * 8]
    assert tw.unique(x, return_inverse=True)[1][-9:].tolist() == [*range(9)]
