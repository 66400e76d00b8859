"""Laws of sum, for every form of it."""

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import (
    LAYOUTS,
    assert_compiles,
    assert_gradients_match,
    assert_right,
    few_examples,
    laid_out,
    layouts,
    shapes,
)
from tilewright.ops import _numba, _reduce
from tilewright.ops import sum as module

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
FORMS = ["eager", "triton", CUDA, "numba"]
inf, nan = float("inf"), float("nan")


@pytest.fixture
def fast_path(monkeypatch):
    """The public function takes our kernels however small the input."""
    monkeypatch.setattr(module, "SMALLEST", 0)


def integers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(device, dtype)


def same(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_is_linear_and_the_order_of_rows_is_kept(form, device):
    total = module.op.kernels[form].fn
    x, y = (integers(4, 23, device=device, seed=seed) for seed in (0, 1))
    same(total(2 * x - y), 2 * total(x) - total(y))
    shuffled = torch.tensor([2, 0, 3, 1], device=device)
    noise = laid_out((4, 23), "contiguous", device=device)
    torch.testing.assert_close(total(noise[shuffled]), total(noise)[shuffled])  # a row's alignment may set its order


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 2), (3, 1), (2, 33), (1, 129)])
def test_every_element_counts_once(form, M, N, device):
    x = integers(M, N, device=device)
    same(module.sum_forward(x, form), x.sum(-1))


@pytest.mark.parametrize("form", ["triton", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize(
    ("M", "N", "programs"),
    [
        (700, 9, 4224),  # short rows, several to a program
        (3, 2048, 4224),
        (3, 12289, 4),  # long rows of odd length, each by one program in a loop
        (2, 4096, 4),
        (1, 20011, 2),  # one long row, cut into pieces of several blocks
        (2, 20011, 4224),  # and into as many pieces as there are blocks
    ],
)
def test_every_element_counts_once_in_every_regime(form, dtype, layout, M, N, programs, device, monkeypatch):
    monkeypatch.setattr(_reduce, "PROGRAMS", programs)
    monkeypatch.setattr(module, "CUDA_BLOCK", 1024)
    x = laid_out((M, N), layout, device=device, dtype=dtype).mul(3).round()
    same(module.sum_forward(x, form), x.double().sum(-1).to(dtype))


@few_examples
@given(M=st.integers(1, 5000), N=st.integers(1, 2**40), block=st.sampled_from([1024, 4096, 16384]))
def test_pieces_cover_a_row_and_fill_the_gpu(M, N, block):
    chunk, chunks = _reduce.split(M, N, block)
    assert chunk * (chunks - 1) < N <= chunk * chunks
    if chunks > 1:
        assert chunk % block == 0
    if M * triton.cdiv(N, block) >= _reduce.PROGRAMS:  # there is enough to do for all
        assert _reduce.PROGRAMS // 4 <= M * chunks <= max(M, 2 * _reduce.PROGRAMS)


@pytest.mark.parametrize("form", ["triton", CUDA])
def test_the_same_bits_every_time(form, device):
    for shape in ((1, 100003), (50, 67)):
        x = laid_out(shape, "contiguous", device=device)
        same(module.sum_forward(x, form), module.sum_forward(x.clone(), form))


@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form, device):
    rows = [[inf, 1, 2], [inf, -inf, 0], [nan, 0, 0], [3e38, 3e38, 0], [-0.0, -0.0, -0.0]]
    x = torch.tensor(rows, device=device)
    same(module.op.kernels[form].fn(x), torch.tensor([inf, nan, nan, inf, 0.0], device=device))


def test_half_precision_is_accumulated_in_fp32(device):
    x = torch.ones(1, 60000, device=device, dtype=torch.float16)
    same(module.sum_forward(x, "triton"), torch.full((1,), 60000.0, device=device, dtype=torch.float16))
    assert module.sum_forward(torch.cat((x, x), dim=-1), "triton").item() == inf


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 12, 33])
def test_numba_tree_with_any_number_of_threads(threads, device):
    """The same tree as in cuda/reduce.cuh."""
    x = integers(2, 50, device=device)
    out = torch.empty(2, 1, device=device)
    _numba.launch(_reduce.numba_sum_chunks(), (2, 1), threads, x, out, 50)
    same(out.view(2), x.sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 100, 257, 1000, 1024])
@pytest.mark.parametrize(("M", "N"), [(1, 10), (501, 64), (37, 4099), (1, 100003)])
def test_cuda_tree_with_any_number_of_threads(threads, M, N, device, monkeypatch):
    monkeypatch.setattr(module, "CUDA_THREADS", threads)
    x = integers(M, N, device=device)
    same(module.sum_forward(x, "cuda"), x.sum(-1))


@few_examples
@given(shape=shapes, layout=layouts, data=st.data())
def test_any_shape_layout_and_dims(shape, layout, data, device, fast_path):
    x = laid_out(shape, layout, device=device)
    rank = len(shape)
    some = st.lists(st.integers(-rank, rank - 1), max_size=rank, unique_by=lambda d: d % rank)
    dim = data.draw(st.none() | st.integers(-rank, rank - 1) | some.map(tuple) | some)
    keepdim = data.draw(st.booleans())
    assert_right(tw.sum(x, dim, keepdim), lambda x: torch.sum(x, dim, keepdim), x)
    assert tw.sum(x, dim, keepdim).stride() == torch.sum(x, dim, keepdim).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [None, -1, (1, 2), 0])
def test_gradients(layout, dim, device, fast_path):
    x = laid_out((3, 4, 11), layout, device=device)
    assert_gradients_match(lambda x: tw.sum(x, dim), lambda x: torch.sum(x, dim), x)
    assert_gradients_match(lambda x: tw.sum(x, dim, keepdim=True), lambda x: torch.sum(x, dim, keepdim=True), x)


def test_gradients_of_gradients(device, fast_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, device=device, requires_grad=True)
    (ours,) = torch.autograd.grad(tw.sum(x.pow(3), -1).square().sum(), x, create_graph=True)
    (theirs,) = torch.autograd.grad(x.pow(3).sum(-1).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dim", [None, -1, 0, ()])
def test_whatever_torch_takes(shape, dim, device, fast_path):
    x = integers(*shape, device=device)
    for kind in (x, x.double(), x.int(), x > 0, x.to(torch.complex64), x.half()):
        same(tw.sum(kind, dim), torch.sum(kind, dim))
    same(tw.sum(x, dim, True), torch.sum(x, dim, True))
    same(tw.sum(x.half(), dim, dtype=torch.float32), torch.sum(x.half(), dim, dtype=torch.float32))
    same(tw.sum(x, dim, dtype=torch.int32), torch.sum(x, dim, dtype=torch.int32))
    same(tw.sum(x), torch.sum(x))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls them prototypes
def test_sparse_tensors_as_torch(device, fast_path):
    x = torch.eye(4, device=device)
    same(tw.sum(x.to_sparse()), torch.sum(x))
    same(tw.sum(x.to_sparse(), -1).to_dense(), torch.sum(x, -1))
    same(tw.sum(x.to_sparse_csr()), torch.sum(x))


def test_errors_are_torchs_own(device, fast_path):
    x = torch.randn(4, 3, device=device)
    for bad in ((x, 2), (x, (0, 0)), (x, (-1, 1)), (x, "rows"), (x, 0.5), (3,)):
        with pytest.raises((RuntimeError, TypeError, IndexError)) as theirs:
            torch.sum(*bad)
        with pytest.raises(theirs.type):
            tw.sum(*bad)


def test_autocast_and_functional_transforms_as_torch(device, fast_path):
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.sum(x.half(), -1).dtype == torch.sum(x.half(), -1).dtype
    torch.testing.assert_close(torch.func.vmap(tw.sum)(x), x.sum(-1))
    ours = torch.func.jvp(lambda x: tw.sum(x, -1), (x,), (x,))
    torch.testing.assert_close(ours, torch.func.jvp(lambda x: torch.sum(x, -1), (x,), (x,)))


def test_small_inputs_go_to_torch(device, monkeypatch):
    monkeypatch.setattr(module, "sum_forward", lambda *_: pytest.fail("our kernel was launched"))
    x = torch.randn(4, 8, device=device)
    same(tw.sum(x, -1), x.sum(-1))


def test_registered_operator(device, fast_path):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    torch.library.opcheck(module.sum_forward, (x, "triton"))
    torch.library.opcheck(module.sum_forward, (x.detach().t(), "triton"))
    torch.library.opcheck(module.sum_forward, (x.detach()[:, :0], "triton"))
    assert_compiles(lambda x: tw.sum(x, -1), x.detach())
    assert_compiles(tw.sum, x.detach())
    torch._dynamo.reset()
    (grad,) = torch.autograd.grad(torch.compile(tw.sum, fullgraph=True, backend="aot_eager")(x), x)
    same(grad, torch.ones_like(x))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["triton", "cuda"])
@pytest.mark.parametrize(("M", "N"), [(1, 2**31 + 9), (2**25 + 1, 65), (2**16 + 1, 2**15 + 1)])
def test_more_than_2_31_elements(form, M, N, device):
    x = torch.zeros(M, N, device=device, dtype=torch.float16)
    x[-1, -9:] = torch.arange(9)
    same(module.sum_forward(x, form)[-2:], torch.tensor([0.0, 36.0][-M:], device=device, dtype=torch.float16))
