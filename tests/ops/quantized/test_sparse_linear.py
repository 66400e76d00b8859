"""Laws of the linear layer with a 2:4 sparse weight."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, few_examples, laid_out
from tilewright.ops.quantized import _sparse
from tilewright.ops.quantized import sparse_linear as module


def pruned(weight):
    """Keep the two largest of four, written out."""
    found = torch.zeros_like(weight)
    for n, row in enumerate(weight.tolist()):
        for start in range(0, len(row), 4):
            four = [(-abs(value), place) for place, value in enumerate(row[start : start + 4])]
            for _, place in sorted(four)[:2]:
                found[n, start + place] = row[start + place]
    return found


def integers(*shape, seed=0):
    return torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(seed)).float()


def drawn(M=3, N=40, K=150, device="cpu", dtype="float32", bias=False):
    (case,) = module.points(M=(M,), N=(N,), K=(K,), bias=(bias,))
    return module.op.make(case.with_dtype(dtype), device)


@few_examples
@given(N=st.integers(1, 7), K=st.integers(1, 300), seed=st.integers(0, 9))
def test_the_two_largest_of_four_are_kept(N, K, seed):
    weight = integers(N, K, seed=seed)  # with many equal magnitudes and zeros
    sparse = tw.sparsify(weight)
    assert torch.equal(sparse.dense(), pruned(weight))
    assert torch.equal(tw.sparsify(sparse.dense()).dense(), sparse.dense())


@few_examples
@given(K=st.integers(1, 200), kept=st.integers(0, 2), seed=st.integers(0, 9))
def test_a_given_mask_is_used(K, kept, seed):
    """Also one that keeps fewer than two weights, or keeps zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = integers(3, K, seed=seed)
    order = torch.rand(3, -(-K // 4), 4, generator=generator).argsort(-1)
    mask = (order < kept).flatten(1)[:, :K]
    assert torch.equal(tw.sparsify(weight, mask).dense(), torch.where(mask, weight, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 128), (3, 33, 300), (16, 130, 1536), (5, 7, 33)])
def test_exact_on_integers(M, N, K, dtype, device):
    weight, x, bias = (integers(*shape, seed=n).to(device, dtype) for n, shape in enumerate([(N, K), (M, K), (N,)]))
    expected = F.linear(x.double(), pruned(weight).double(), bias.double())
    assert torch.equal(tw.sparse_linear(x, tw.sparsify(weight), bias), expected.to(dtype))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits_cover_all_columns_once(splits, device):
    weight, x = integers(20, 640).to(device), integers(4, 640, seed=1).to(device)
    config = _sparse.CONFIGS.default_on(x.get_device(), (16, 20, 640, 4)) | {"splits": splits}
    with _sparse.CONFIGS.override((16, 20, 640, 4), config):
        assert torch.equal(tw.sparse_linear(x, tw.sparsify(weight)), x @ pruned(weight).t())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, device):
    sparse = tw.sparsify(laid_out((9, 70), layout, device=device))
    x, bias = laid_out((5, 70), layout, device=device, seed=1), laid_out((9,), layout, device=device, seed=2)
    assert_right(tw.sparse_linear(x, sparse, bias), module.reference, x, sparse.values, sparse.places, bias)


@pytest.mark.parametrize("shape", [(70,), (0, 70), (2, 3, 70), (20, 70)])
def test_any_shape(shape, device):
    sparse = tw.sparsify(laid_out((9, 70), "contiguous", device=device))
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(tw.sparse_linear(x, sparse), F.linear(x, sparse.dense()), rtol=1e-4, atol=1e-4)


def test_gradients(device):
    x, values, places, bias = drawn(device=device, bias=True)
    ours = lambda x, bias: module.triton_sparse(x, values, places, bias)
    theirs = lambda x, bias: module.reference(x, values.to(x.dtype), places, bias)
    assert_gradients_match(ours, theirs, x, bias)


def test_training_passes_gradients_straight_through(device):
    """The product uses the pruned weight; every weight gets the gradient that its pruned value has."""
    weight, x = (torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 16), (3, 16)))
    y = tw.sparse_linear(x, weight)
    dense = pruned(weight.detach()).requires_grad_()
    assert torch.equal(y, F.linear(x, dense))
    dy = torch.randn_like(y)
    got, wanted = torch.autograd.grad(y, (weight, x), dy), torch.autograd.grad(F.linear(x, dense), (dense, x), dy)
    torch.testing.assert_close(got, wanted)
    assert (got[0] != 0).all()
    mask = torch.tensor([True, False, False, True]).repeat(6, 4).to(device)
    assert torch.equal(tw.sparse_linear(x, weight, mask=mask), F.linear(x, weight * mask))


def test_a_pruned_weight_comes_back_in_training(device):
    target = torch.zeros(1, 4, device=device)
    target[0, 2:] = 3.0
    weight = torch.tensor([[1.0, 1.0, 0.5, 0.5]], device=device, requires_grad=True)
    for _ in range(60):
        loss = (tw.sparse_linear(torch.eye(4, device=device), weight) - target.t()).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    torch.testing.assert_close(tw.sparsify(weight).dense(), target, rtol=0, atol=1e-2)


def test_registered_operator(device):
    x, values, places, bias = drawn(M=2, N=8, K=64, device=device, bias=True)
    args = x.requires_grad_(), values, places, bias.requires_grad_()
    torch.library.opcheck(module.sparse_linear_forward.registered, args)
    sparse = tw.SparseWeight((8, 64), values, places)
    assert_compiles(lambda x: tw.sparse_linear(x, sparse), x.detach())
    weight = torch.randn(8, 64, device=device)
    assert_compiles(lambda x: tw.sparse_linear(x, weight, mask=_sparse.magnitude_mask(weight)), x.detach())


def test_the_container_is_saved_moved_and_copied():
    sparse = tw.sparsify(torch.randn(6, 100).bfloat16())
    expected, file = sparse.dense(), io.BytesIO()
    torch.save(sparse, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(sparse)):
        assert torch.equal(other.dense(), expected)
    assert sparse.to("meta").device.type == "meta"
    assert 8 * tw.sparsify(torch.randn(64, 1024).bfloat16()).nbytes == 9 * 64 * 1024


def test_the_kernel_runs_at_decoding():
    sparse, x = tw.sparsify(torch.randn(9, 70)), torch.randn(17, 70)
    with tw.interpret() as run:
        tw.sparse_linear(x, sparse)
        assert not run.launches
        tw.sparse_linear(x[:16], sparse)
    assert "_sparse_linear_fwd" in {launch.kernel for launch in run.launches}


@pytest.mark.gpu
def test_cusparselt_takes_many_rows(monkeypatch):
    if not torch.backends.cusparselt.is_available():
        pytest.skip("torch has no cuSPARSELt here")
    sparse = tw.sparsify(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    y = tw.sparse_linear(x, sparse)
    assert sparse._for_cusparselt is not None
    torch.testing.assert_close(y, F.linear(x, sparse.dense()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, w: tw.sparsify(w, torch.ones(9, 70, dtype=torch.bool)),
            ValueError,
            "the mask is not 2:4: it keeps ",
        ),
        (
            lambda x, w: tw.sparsify(w, torch.ones(9, 70)),
            ValueError,
            "the mask must be of bool and .9, 70., not torch.flo",
        ),
        (lambda x, w: tw.sparsify(w[0]), TypeError, "sparsify takes a plain matrix of floats"),
        (lambda x, w: tw.sparse_linear(x, w, mask=torch.ones(9, 70) > 0), ValueError, "the mask is not 2:4"),
        (lambda x, w: tw.sparse_linear(x[:, :9], tw.sparsify(w)), ValueError, "the weight 9x70 takes 70 features"),
        (lambda x, w: tw.sparse_linear(x, tw.sparsify(w), mask=w > 0), ValueError, "has its mask already"),
        (lambda x, w: tw.sparse_linear(x, tw.sparsify(w).to("meta")), ValueError, "the weight on meta: move it with"),
        (lambda x, w: tw.sparse_linear(x.half(), tw.sparsify(w)), RuntimeError, "the same dtype, but got"),
        (lambda x, w: tw.sparse_linear(x, "w"), TypeError, "weight is a str, not a tensor or a SparseWeight"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as refused:
        call(torch.randn(3, 70), torch.randn(9, 70))
    assert "\n" not in str(refused.value)
