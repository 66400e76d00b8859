"""Cross entropy of a linear layer: the same as linear, then cross entropy, for every number of chunks."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from support import assert_compiles, assert_right, crossover_at
from tilewright.ops.loss import linear_cross_entropy as module
from tilewright.ops.loss._options import IGNORE_INDEX, REDUCTIONS, CrossEntropy, torch_cross_entropy
from tilewright.ops.loss._plans import launch_rows

M, K, N = 11, 6, 35


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    """Make the public function call our kernels for every size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    """All rows in one chunk, or in chunks of four and an uneven last one."""
    if request.param == "chunks":
        monkeypatch.setattr(module, "CHUNK", 4 * N * 4)


def made(device, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*size, generator=generator) for size in ((M, K), (N, K), (N,)))
    target = torch.randint(N, (M,), generator=generator)
    target[2] = IGNORE_INDEX
    tensors = [t.to(device, dtype) for t in (x, w, b)]
    return *tensors[:2], target.to(device), tensors[2] if bias else None


def plain(x, w, target, *, linear_bias=None, weight=None, z_loss=0.0, softcap=None, reduction="mean", **options):
    logits = F.linear(x, w, linear_bias)
    given = CrossEntropy(reduction=reduction, z_loss=z_loss, softcap=softcap, **options)
    return torch_cross_entropy(logits, target, weight, given)


def all_of(fn, x, w, target, bias, grad=None, **options):
    """Return the loss and the gradients of input, weight and bias."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, w, bias)]
    loss = fn(*leaves[:2], target, linear_bias=leaves[2], **options)
    grad = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)) if grad is None else grad
    return loss.detach(), *torch.autograd.grad(loss, [t for t in leaves if t is not None], grad.to(loss))


def assert_as_plain(x, w, target, bias, *, rtol=1e-5, atol=2e-6, **options):
    found = all_of(tw.linear_cross_entropy, x, w, target, bias, **options)
    exact = [None if t is None else t.double() for t in (x, w, bias)]
    options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    truth = all_of(plain, exact[0], exact[1], target, exact[2], **options)
    for got, true in zip(found, truth, strict=True):
        assert got.dtype == x.dtype
        torch.testing.assert_close(got.double(), true, rtol=rtol, atol=atol)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_option(reduction, bias, chunks, device):
    tensors = made(device, bias=bias)
    assert_as_plain(*tensors, reduction=reduction)
    weight = torch.linspace(0.5, 1.5, N, device=device)
    more = {"weight": weight, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "ignore_index": 3}
    tensors[2][2], tensors[2][5] = 1, 3
    assert_as_plain(*tensors, reduction=reduction, **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, chunks, device):
    x, w, target, bias = made(device, dtype)
    eps = torch.finfo(dtype).eps
    assert_as_plain(x, w, target, bias, rtol=8 * eps, atol=8 * eps)
    loss = tw.linear_cross_entropy(x, w, target, linear_bias=bias)
    assert_right(loss, lambda x, w, b: module.reference(x, w, target, b, "mean", 0.0, 0.0, None), x, w, bias)


def test_logits_are_never_all_in_memory(device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4 * N * 4)
    sizes = []
    monkeypatch.setattr(module, "launch_rows", lambda *a, **k: sizes.append(a[1].shape) or launch_rows(*a, **k))
    x, w, target, bias = made(device)
    for reduction in ("mean", "none"):
        all_of(tw.linear_cross_entropy, x, w, target, bias, reduction=reduction)
    assert sizes == [(4, N), (4, N), (3, N)] * 3


def test_chunks_of_a_language_model_are_few_and_even(device, monkeypatch):
    """Shapes alone, on the meta device."""
    seen = []
    monkeypatch.setattr(module, "launch_rows", lambda options, logits, *a, **k: seen.append(logits.shape))
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, lambda *a, **k: None)
    x, w = torch.empty(8192, 16, device="meta", dtype=torch.bfloat16), torch.empty(128256, 16, device="meta").bfloat16()
    inputs = module._Inputs(x, w, torch.empty(8192, device="meta"), None, None)
    module._chunked(CrossEntropy(), inputs, None, x[:, 0])
    assert seen == [(2048, 128256)] * 4


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_required_gradients_are_computed(needed, reduction, device):
    x, w, target, bias = made(device)
    leaves = [t.requires_grad_(need) for t, need in zip((x, w, bias), needed, strict=True)]
    loss = tw.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], reduction=reduction).sum()
    loss.backward()
    assert tuple(t.grad is not None for t in leaves) == needed


def test_saved_gradients_are_used_once_and_recomputed_later(chunks, device):
    x, w, target, bias = made(device)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    loss = tw.linear_cross_entropy(x, w, target, linear_bias=bias)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, leaves)
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(b, 3 * a, rtol=1e-5, atol=1e-6)


def test_double_backward(device):
    found = []
    for fn in (tw.linear_cross_entropy, plain):
        x, w, target, bias = made(device)
        leaves = [t.requires_grad_() for t in (x, w, bias)]
        slopes = torch.autograd.grad(fn(x, w, target, linear_bias=bias).square(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(s.square().sum() for s in slopes), leaves))
    torch.testing.assert_close(*found)


def test_invalid_target_gives_nan(chunks, device):
    x, w, target, bias = made(device)
    target[4] = N
    loss = tw.linear_cross_entropy(x, w, target, linear_bias=bias, reduction="none")
    assert loss.isnan().nonzero().tolist() == [[4]]


def test_accepts_what_cross_entropy_accepts(device):
    x, w, target, bias = made(device)
    torch.testing.assert_close(
        tw.linear_cross_entropy(x[0], w, target[0], linear_bias=bias), plain(x[0], w, target[0], linear_bias=bias)
    )
    probabilities = torch.softmax(F.linear(x, w).flip(0), -1)
    torch.testing.assert_close(tw.linear_cross_entropy(x, w, probabilities), plain(x, w, probabilities))
    strided = all_of(tw.linear_cross_entropy, x.t().contiguous().t(), w.t().contiguous().t(), target, bias)
    torch.testing.assert_close(strided, all_of(plain, x, w, target, bias), rtol=1e-5, atol=1e-6)
    assert tw.linear_cross_entropy(x[:0], w, target[:0], reduction="sum") == 0
    torch.testing.assert_close(
        tw.linear_cross_entropy(x.double(), w.double(), target), plain(x.double(), w.double(), target)
    )
    with pytest.raises(RuntimeError):
        tw.linear_cross_entropy(x, w[:, 1:], target)
    with pytest.raises(ValueError, match="softcap must be positive"):
        tw.linear_cross_entropy(x, w, target, softcap=-1.0)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
def test_matches_torch(device):
    x, w, target, bias = made(device)
    options = {"linear_bias": bias, "label_smoothing": 0.1, "ignore_index": 3, "reduction": "sum"}
    target[2] = 3
    torch.testing.assert_close(
        tw.linear_cross_entropy(x, w, target, **options), F.linear_cross_entropy(x, w, target, **options)
    )


def test_registered_operators_and_compile(device):
    x, w, target, bias = made(device)
    forward, backward = module.linear_cross_entropy_forward, module.linear_cross_entropy_backward
    options = CrossEntropy(-100, "mean", 0.1, 0.01, 5.0, "triton")
    torch.library.opcheck(forward.registered, (x.clone().requires_grad_(), w, target, bias, None, *options))
    loss, divisor = forward(x, w, target, bias, None, options)
    args = (x, w, torch.ones_like(loss), target, bias, None, divisor, [True, True, False], *options)
    torch.library.opcheck(backward.registered, args)
    assert_compiles(lambda x: tw.linear_cross_entropy(x, w, target), x)
    compiled = torch.compile(tw.linear_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(all_of(compiled, x, w, target, bias), all_of(plain, x, w, target, bias))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_in_float32(reduction, chunks, device):
    x, w, target, _ = made(device, torch.bfloat16)
    options = dict(reduction=reduction, dtype=torch.float32)
    wide, narrow = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
    loss = tw.linear_cross_entropy(*wide, target, **options)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(F.linear(x.float(), w.float()), target, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    (loss.sum() / 7).backward()
    (tw.linear_cross_entropy(*narrow, target, reduction=reduction).sum() / 7).backward()
    for one, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-2)


def test_no_other_dtype_of_the_loss(device):
    x, w, target, _ = made(device)
    with pytest.raises(ValueError, match=r"None or torch.float32, not torch.float16"):
        tw.linear_cross_entropy(x, w, target, dtype=torch.float16)


def test_a_loss_in_fp32_adds_up_the_gradient_of_the_weight_in_fp32(device, monkeypatch):
    """With one row per chunk, bf16 sums would lose what fp32 sums keep: the result is rounded once."""
    monkeypatch.setattr(module, "CHUNK", 1)
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(40, 3, generator=generator) + 2).to(device, torch.bfloat16)
    w = torch.randn(7, 3, generator=generator).to(device, torch.bfloat16)
    target = torch.randint(7, (40,), generator=generator).to(device)

    def errors(**options):
        ours, truth = w.clone().requires_grad_(), w.double().requires_grad_()
        tw.linear_cross_entropy(x, ours, target, reduction="sum", **options).backward()
        module.torch_cross_entropy(F.linear(x.double(), truth), target, None, CrossEntropy(reduction="sum")).backward()
        assert ours.grad.dtype == torch.bfloat16
        return ((ours.grad.double() - truth.grad).norm() / truth.grad.norm()).item()

    assert errors(dtype=torch.float32) < errors() / 2
