"""Cross entropy: every option, with the gradient computed in forward and in backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import LAYOUTS, assert_compiles, assert_right, crossover_at, few_examples, laid_out
from tilewright.ops.loss import _plans
from tilewright.ops.loss import cross_entropy as module
from tilewright.ops.loss._options import IGNORE_INDEX, REDUCTIONS, CrossEntropy

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
inf, nan = float("inf"), float("nan")
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    """Make the public function call our kernels for every size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.fixture(params=["tile", "loop"])
def columns(request, monkeypatch):
    """Both kernels: a row as one tile, or in blocks with an unaligned edge."""
    if request.param == "loop":
        config = {"BLOCK_M": 1, "BLOCK_N": 128, "num_warps": 1}
        monkeypatch.setattr(_plans, "CONFIG", lambda *_: config)
    return 77 if request.param == "tile" else 139


def made(M, N, device, dtype=torch.float32, ignored=True):
    generator = torch.Generator().manual_seed(M + N)
    x = 2 * torch.randn(M, N, generator=generator)
    target = torch.randint(N, (M,), generator=generator)
    if ignored and M > 1:
        target[1] = IGNORE_INDEX
    weight = 0.5 + torch.rand(N, generator=generator)
    return x.to(device, dtype), target.to(device), weight.to(device, dtype)


def plain(x, target, weight=None, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=-100):
    """The formula."""
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    log_p = z - torch.logsumexp(z, -1, keepdim=True)
    w = torch.ones_like(x[0]) if weight is None else weight
    index = not target.is_floating_point()
    ignored = target == ignore_index if index else torch.zeros_like(x[:, 0]).bool()
    t = F.one_hot(target.masked_fill(ignored, 0), x.shape[1]).to(x) if index else target
    q = w * ((1 - label_smoothing) * t + label_smoothing / x.shape[1])
    loss = -(q * log_p).sum(-1) + z_loss * torch.logsumexp(z, -1).square()
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    each = (t * w).sum(-1).masked_fill(ignored, 0) if index else torch.ones_like(loss)
    return loss.sum() / (each.sum() if reduction == "mean" else 1)


def both(fn, x, *args, grad=None, **options):
    """Return the loss and the gradient of x."""
    x = x.detach().requires_grad_()
    loss = fn(x, *args, **options)
    grad = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)) if grad is None else grad
    return loss.detach(), *torch.autograd.grad(loss, x, grad.to(loss))


def assert_as_plain(x, target, weight, *, rtol=1e-5, atol=2e-6, **options):
    loss, dx = both(tw.cross_entropy, x, target, weight, **options)
    exact = [a.double() if a is not None and a.is_floating_point() else a for a in (x, target, weight)]
    true_loss, true_dx = both(plain, *exact, **options)
    torch.testing.assert_close(loss.double(), true_loss, rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(dx.double(), true_dx, rtol=rtol, atol=atol)
    with torch.no_grad():
        alone = tw.cross_entropy(x, target, weight, **options)
    torch.testing.assert_close(alone, loss, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_option(smoothing, weighted, columns, device):
    x, target, weight = made(3, columns, device)
    targets = (target, torch.softmax(x.flip(0), -1))
    reductions = itertools.cycle(REDUCTIONS)
    for more, t in itertools.product(({}, {"z_loss": 0.01}, {"z_loss": 0.01, "softcap": 3.0}), targets):
        w = weight if weighted else None
        assert_as_plain(x, t, w, reduction=next(reductions), label_smoothing=smoothing, **more)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype(reduction, dtype, columns, device):
    x, target, _ = made(4, columns, device, dtype)
    eps = torch.finfo(dtype).eps
    options = {"reduction": reduction, "z_loss": 0.01}
    loss, dx = both(tw.cross_entropy, x, target, **options)
    assert loss.dtype == dx.dtype == dtype
    true_loss, true_dx = both(plain, x.double(), target, **options)
    torch.testing.assert_close(loss.double(), true_loss, rtol=2 * eps, atol=1e-6)
    torch.testing.assert_close(dx.double(), true_dx, rtol=4 * eps, atol=1e-6)


@pytest.mark.slow
@few_examples
@given(M=st.integers(1, 9), N=st.integers(1, 70), layout=st.sampled_from(LAYOUTS))
def test_any_shape_and_layout(M, N, layout, device):
    x = laid_out((M, N), layout, device=device)
    target = torch.arange(2 * M, device=device)[::2] % N
    assert_right(
        tw.cross_entropy(x, target, reduction="none"), lambda x: F.cross_entropy(x, target, reduction="none"), x
    )
    loss, dx = both(tw.cross_entropy, x, target)
    true_loss, true_dx = both(F.cross_entropy, x.double(), target)
    torch.testing.assert_close((loss.double(), dx.double()), (true_loss, true_dx), rtol=1e-5, atol=1e-6)


def test_row_gradients_sum_to_zero_and_shifts_are_neutral(columns, device):
    x, target, _ = made(6, columns, device)
    loss, dx = both(tw.cross_entropy, x, target, reduction="sum", grad=torch.tensor(1.0))
    torch.testing.assert_close(dx.sum(-1), torch.zeros(6, device=device), rtol=0, atol=1e-6)
    torch.testing.assert_close(tw.cross_entropy(x + 100, target, reduction="sum"), loss, rtol=1e-5, atol=0)


def test_loss_of_equal_logits_is_the_logarithm_of_their_number(columns, device):
    x = torch.full((3, columns), -7.0, device=device)
    loss = tw.cross_entropy(x, torch.arange(3, device=device), label_smoothing=0.3)
    torch.testing.assert_close(loss, torch.tensor(float(columns), device=device).log())


@reductions
def test_ignored_rows_have_no_loss(reduction, columns, device):
    x, target, _ = made(4, columns, device, ignored=False)
    target[2] = 5
    x[target == 5] = nan  # which would spread if these rows were read
    loss, dx = both(tw.cross_entropy, x, target, reduction=reduction, ignore_index=5, label_smoothing=0.1, softcap=9.0)
    assert not loss.isnan().any()
    assert not dx[target == 5].any()
    assert dx[target != 5].all()


def test_all_targets_ignored_matches_torch(columns, device):
    x, target, weight = made(3, columns, device)
    target[:] = IGNORE_INDEX
    for w, smoothing in ((None, 0.0), (weight, 0.1)):
        loss, dx = both(tw.cross_entropy, x, target, w, label_smoothing=smoothing)
        assert loss.isnan()
        assert not dx.any()


@pytest.mark.parametrize("weighted", [False, True])
def test_invalid_target_gives_nan_and_reads_in_bounds(weighted, columns, device):
    """The interpreter fails on an access out of bounds."""
    x, target, weight = made(6, columns, device, ignored=False)
    target[2:] = torch.tensor([-1, columns, 2**40, -(2**40)])
    for reduction in ("none", "mean"):
        x = x.detach().requires_grad_()
        loss = tw.cross_entropy(x, target, weight if weighted else None, reduction=reduction, label_smoothing=0.1)
        (dx,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isnan().tolist() == ([False] * 2 + [True] * 4 if reduction == "none" else True)
        assert dx[2:].isnan().all()
        assert dx[:2].isfinite().all()


@pytest.mark.parametrize("special", [inf, -inf, nan])
def test_extreme_values_match_torch(special, columns, device):
    x, target, _ = made(4, columns, device, ignored=False)
    x[1, 2], x[2, int(target[2])], x[3] = special, special, special
    args = (x, target, None, None, -100, None, "none")
    torch.testing.assert_close(tw.cross_entropy(*args), F.cross_entropy(*args), equal_nan=True)
    large = torch.zeros_like(x)
    large[:, 0], large[:, 1] = 6e4, -3e38
    loss, dx = both(tw.cross_entropy, large, torch.tensor([0, 1, 2, 0], device=device), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0, 3e38, 6e4, 0], device=device))
    assert dx.isfinite().all()


def test_softcap_bounds_logits_and_z_loss_normalizes_them(device):
    x, target, _ = made(4, 30, device, ignored=False)
    capped = tw.cross_entropy(1e4 * x, target, softcap=2.0, reduction="none")
    assert capped.max() < 4 + torch.tensor(30.0).log()
    normal = torch.log_softmax(x, -1)  # logsumexp is 0, and so is the slope of its square
    with_z, dz = both(tw.cross_entropy, normal, target, z_loss=3.0, grad=torch.tensor(1.0))
    without, d = both(tw.cross_entropy, normal, target, grad=torch.tensor(1.0))
    torch.testing.assert_close((with_z, dz), (without, d), rtol=1e-5, atol=1e-5)


def test_losses_of_many_rows_are_partial_sums(device, monkeypatch):
    monkeypatch.setattr(_plans, "BLOCK_M", 16)
    monkeypatch.setattr(_plans, "MAX_PARTS", 3)
    x, target, weight = made(101, 5, device)
    for reduction, w in itertools.product(("mean", "sum"), (None, weight)):
        assert_as_plain(x, target, w, reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_saved_gradient_is_used_once_and_recomputed_later(dtype, columns, device):
    x, target, _ = made(4, columns, device, dtype)
    x.requires_grad_()
    loss = tw.cross_entropy(x, target)
    loss.backward(retain_graph=True)
    first = x.grad
    first_values = first.clone()
    (second,) = torch.autograd.grad(2 * loss, x, retain_graph=True)
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(first, first_values)
    torch.testing.assert_close(second, 2 * first_values)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * first_values)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_logits_are_not_modified(columns, device):
    """`check` does not test it, since another library overwrites them."""
    x, target, _ = made(4, columns, device)
    before = x.clone()
    for reduction in ("none", "mean"):
        both(tw.cross_entropy, x, target, reduction=reduction)
        both(tw.cross_entropy, x.t().contiguous().t(), target, reduction=reduction)
    assert torch.equal(x, before)


def test_unit_incoming_gradient_skips_scaling(device, monkeypatch):
    x, target, _ = made(4, 33, device)
    launches = []
    monkeypatch.setattr(module, "launch_rows", lambda *a, **k: launches.append(k) or _plans.launch_rows(*a, **k))
    both(tw.cross_entropy, x, target, grad=torch.tensor(1.0))
    assert len(launches) == 1, "forward and backward together read the logits in one kernel"
    both(tw.cross_entropy, x, target, reduction="none")
    both(tw.cross_entropy, x.half(), target)
    assert len(launches) == 5


def test_loss_scaling_keeps_small_fp16_gradients(device):
    x, target, _ = made(64, 33, device, torch.float16)
    x *= 2
    _, dx = both(tw.cross_entropy, x, target, grad=torch.tensor(2.0**10))
    _, true = both(plain, x.double(), target, grad=torch.tensor(2.0**10))
    torch.testing.assert_close(dx.double(), true, rtol=1e-3, atol=1e-7)


@reductions
def test_double_backward(reduction, device):
    x, target, weight = made(3, 7, device)
    args = (target, weight, None, -100, None, reduction, 0.1)
    found = []
    for fn in (tw.cross_entropy, F.cross_entropy):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(leaf, *args).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), leaf))
    torch.testing.assert_close(*found)


@reductions
def test_one_row_without_a_batch(reduction, device):
    x, target, weight = made(1, 13, device)
    for t in (target[0], torch.softmax(x[0], -1)):
        found = both(tw.cross_entropy, x[0], t, weight, reduction=reduction)
        torch.testing.assert_close(found, both(F.cross_entropy, x[0], t, weight, reduction=reduction))


@reductions
def test_accepts_what_torch_accepts(reduction, device):
    image = torch.randn(2, 5, 3, 4, device=device)
    target = torch.randint(5, (2, 3, 4), device=device)
    args = (None, None, -100, None, reduction, 0.1)
    torch.testing.assert_close(tw.cross_entropy(image, target, *args), F.cross_entropy(image, target, *args))
    flat, flat_target = image.movedim(1, -1).reshape(-1, 5), target.reshape(-1)
    capped = tw.cross_entropy(image, target, *args, z_loss=0.1, softcap=2.0)
    torch.testing.assert_close(
        capped.reshape(-1), tw.cross_entropy(flat, flat_target, *args, z_loss=0.1, softcap=2.0).reshape(-1)
    )
    empty, none = torch.empty(0, 4, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.testing.assert_close(
        tw.cross_entropy(empty, none, *args), F.cross_entropy(empty, none, *args), equal_nan=True
    )
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    torch.testing.assert_close(tw.cross_entropy(x, target[0, :, 0], *args), F.cross_entropy(x, target[0, :, 0], *args))


@pytest.mark.filterwarnings("ignore::UserWarning")  # size_average and reduce are deprecated
def test_deprecated_reduction_arguments(device):
    x, target, _ = made(3, 5, device)
    for size_average, reduce in ((True, True), (False, None), (None, False)):
        args = (x, target, None, size_average, -100, reduce)
        torch.testing.assert_close(tw.cross_entropy(*args), F.cross_entropy(*args))


def test_gradients_of_probabilities_match_torch(device):
    x, _, _ = made(3, 5, device)
    found = []
    for fn in (tw.cross_entropy, F.cross_entropy):
        t = torch.softmax(x.flip(0), -1).requires_grad_()
        found.append(torch.autograd.grad(fn(x, t), t))
    torch.testing.assert_close(*found)


def test_errors_match_torch(device):
    x, target, weight = made(4, 5, device)
    for args, options in (
        ((x, target.int()), {}),
        ((x, target[:3]), {}),
        ((x, target, weight[:3]), {}),
        ((x, target, weight.half()), {}),
        ((x, target), {"reduction": "most"}),
        ((x, target), {"label_smoothing": 1.5}),
        ((x, target), {"ignore_index": 0.5}),
        ((3, target), {}),
    ):
        with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
            F.cross_entropy(*args, **options)
        with pytest.raises(theirs.type) as ours:
            tw.cross_entropy(*args, **options)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError, match="softcap must be positive, not 0"):
        tw.cross_entropy(x, target, softcap=0)
    with pytest.raises(TypeError, match="z_loss must be a number"):
        tw.cross_entropy(x, target, z_loss="much")


def test_autocast_and_functional_transforms_match_torch(device):
    x, target, _ = made(4, 8, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tw.cross_entropy(x.bfloat16(), target).dtype == F.cross_entropy(x.bfloat16(), target).dtype
    torch.testing.assert_close(
        torch.func.grad(tw.cross_entropy)(x, target), torch.func.grad(F.cross_entropy)(x, target)
    )


def test_registered_operators(device):
    x, target, weight = made(4, 33, device)
    forward, backward = module.cross_entropy_forward, module.cross_entropy_backward
    mean = CrossEntropy(-100, "mean", 0.1, 0.01, 5.0, "triton")
    none = mean._replace(reduction="none")
    torch.library.opcheck(forward.registered, (x.t().contiguous().t(), target, None, *none))
    torch.library.opcheck(forward.registered, (x.clone().requires_grad_(), target, weight, *mean))
    loss, stats, divisor = forward(x, target, weight, mean)
    saved = (x, torch.ones_like(loss), target, weight, stats, divisor)
    torch.library.opcheck(backward.registered, (*saved, *mean))


def test_compiles(device):
    x, target, _ = made(4, 33, device)
    assert_compiles(lambda x: tw.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1), x)
    compiled = torch.compile(tw.cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (4, 7):
        x, target, _ = made(M, 33, device)
        torch.testing.assert_close(both(compiled, x, target), both(tw.cross_entropy, x, target))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [2**15, 2**17 + 1])
def test_more_than_2_31_elements(N, device):
    M = 2**31 // N + 9
    x = torch.zeros(M, N, device=device, dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, N, device=device)
    target = torch.arange(M, device=device)
    loss, dx = both(tw.cross_entropy, x, target, reduction="sum", grad=torch.tensor(1.0))
    losses = tw.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(
        losses[-5:].float(), F.cross_entropy(x[-5:].float(), target[-5:], reduction="none"), rtol=1e-2, atol=0
    )
    _, true = both(F.cross_entropy, x[-5:].float(), target[-5:], reduction="sum", grad=torch.tensor(1.0))
    torch.testing.assert_close(dx[-5:].float(), true, rtol=1e-2, atol=1e-6)
    assert loss.isfinite()
