"""Laws of sum, for every kernel."""

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from reduction_laws import ReductionLaws, inf, nan, registered, same
from reduction_laws import few_programs as few_programs
from support import crossover_at, few_examples, laid_out
from tilewright.ops.reduce import _numba as _reduce_numba
from tilewright.ops.reduce import _plans
from tilewright.ops.reduce import sum as module
from tilewright.runtime import numba as _numba
from tilewright.runtime.gpus import gpu_facts

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
FORMS = ["eager", "triton", CUDA, "numba"]


class TestSum(ReductionLaws):
    module, call, formula, has_dtype = module, tw.sum, torch.sum, True


def integers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return values whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_is_linear_and_keeps_the_order_of_rows(form, device):
    total = module.op.kernels[form].fn
    x, y = (integers(4, 23, device=device, seed=seed) for seed in (0, 1))
    same(total(2 * x - y), 2 * total(x) - total(y))
    shuffled = torch.tensor([2, 0, 3, 1], device=device)
    noise = laid_out((4, 23), "contiguous", device=device)
    torch.testing.assert_close(
        total(noise[shuffled]), total(noise)[shuffled]
    )  # the alignment of a row may change its order of summation


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 2), (3, 1), (2, 33), (1, 129)])
def test_every_element_counts_once(form, M, N, device):
    x = integers(M, N, device=device)
    same(module.op.kernels[form].fn(x), x.sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize(
    ("M", "N", "programs", "rows"),
    [
        (700, 9, 4224, 1056),  # short rows, several per program
        (3, 2048, 4224, 1056),
        (3, 12289, 4, 1),  # long rows of odd length, one program each
        (2, 4096, 4, 1),
        (1, 20011, 3, 2),  # one long row, split into parts of several blocks
        (2, 20011, 4224, 1056),  # one part per block
    ],
)
def test_every_element_counts_once_in_every_regime(
    dtype, layout, M, N, programs, rows, device, monkeypatch, few_programs
):
    few_programs(programs, rows)
    monkeypatch.setattr(module, "CUDA_BLOCK", 1024)
    x = laid_out((M, N), layout, device=device, dtype=dtype).mul(3).round()
    same(module.sum_rows(x, "cuda"), x.double().sum(-1).to(dtype))


@few_examples
@given(M=st.integers(1, 5000), N=st.integers(1, 2**40), block=st.sampled_from([1024, 4096, 16384]))
def test_splits_cover_a_row_and_fill_the_gpu(M, N, block):
    chunk, chunks = _plans.split(M, N, block, -1)
    assert chunk * (chunks - 1) < N <= chunk * chunks
    if chunks > 1:
        assert chunk % block == 0
    programs = _plans.max_programs(gpu_facts(-1))
    if M * triton.cdiv(N, block) >= programs:  # enough work for all of them
        assert programs // 4 <= M * chunks <= max(M, 2 * programs)


def test_more_programs_take_shorter_splits():
    assert _plans.split(1, 2**28, 8192, -1, 4096) == (2**16, 4096)
    assert _plans.split(1, 2**28, 8192, -1, 16384) == (2**14, 16384)
    rows = _plans.many_rows(gpu_facts(-1))
    assert _plans.split(rows, 2**28, 8192, -1, 16384) == (2**28, 1), "the rows fill the GPU"


@pytest.mark.gpu
def test_cuda_results_are_deterministic(device):
    for shape in ((1, 100003), (50, 67)):
        x = laid_out(shape, "contiguous", device=device)
        same(module.sum_rows(x, "cuda"), module.sum_rows(x.clone(), "cuda"))


@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form, device):
    rows = [[inf, 1, 2], [inf, -inf, 0], [nan, 0, 0], [3e38, 3e38, 0], [-0.0, -0.0, -0.0]]
    x = torch.tensor(rows, device=device)
    same(module.op.kernels[form].fn(x), torch.tensor([inf, nan, nan, inf, 0.0], device=device))


def test_half_precision_is_accumulated_in_fp32(device, monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
    x = torch.ones(1, 60000, device=device, dtype=torch.float16)
    same(tw.sum(x, -1), torch.full((1,), 60000.0, device=device, dtype=torch.float16))
    assert tw.sum(torch.cat((x, x), dim=-1), -1).item() == inf


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 12, 33])
def test_numba_tree_with_any_number_of_threads(threads, device):
    """The same reduction tree as in ops/include/reduce.cuh."""
    x = integers(2, 50, device=device)
    out = torch.empty(2, 1, device=device)
    _numba.launch(_reduce_numba.numba_sum_chunks(), (2, 1), threads, x, out, 50)
    same(out.view(2), x.sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 100, 257, 1000, 1024])
@pytest.mark.parametrize(("M", "N"), [(1, 10), (501, 64), (37, 4099), (1, 100003)])
def test_cuda_tree_with_any_number_of_threads(threads, M, N, device, monkeypatch):
    monkeypatch.setattr(module, "CUDA_THREADS", threads)
    x = integers(M, N, device=device)
    same(module.sum_rows(x, "cuda"), x.sum(-1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that they are prototypes
def test_sparse_tensors_match_torch(device):
    x = torch.eye(4, device=device)
    same(tw.sum(x.to_sparse()), torch.sum(x))
    same(tw.sum(x.to_sparse(), -1).to_dense(), torch.sum(x, -1))
    same(tw.sum(x.to_sparse_csr()), torch.sum(x))


def test_registered_operators(device):
    registered("sum", device)
    x = torch.randn(3, 4, device=device)
    torch.library.opcheck(module.sum_rows.registered, (x.clone().requires_grad_(), "numba"))
    torch.library.opcheck(module.sum_rows.registered, (x[:, :0], "numba"))


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(1, 2**31 + 9), (2**25 + 1, 65), (2**16 + 1, 2**15 + 1)])
def test_cuda_with_more_than_2_31_elements(M, N, device):
    x = torch.zeros(M, N, device=device, dtype=torch.float16)
    x[-1, -9:] = torch.arange(9)
    same(module.sum_rows(x, "cuda")[-2:], torch.tensor([0.0, 36.0][-M:], device=device, dtype=torch.float16))
