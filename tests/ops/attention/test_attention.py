"""Attention: properties of the reference and of the kernel."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import assert_compiles, assert_right, crossover_at, few_examples, laid_out, layouts
from tilewright.ops.attention import _formula, _operators
from tilewright.ops.attention import attention as module

FORMS = ["eager", "triton"]
LENGTHS = [(1, 1), (1, 40), (64, 64), (130, 70), (70, 150)]


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernel for sequences of any length."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
    monkeypatch.setattr(module, "MODES_CROSSOVER", crossover_at(0))


def run(form, *args):
    return module.op.kernels[form].fn(*args)


def drawn(device, B=1, H=2, HKV=None, LQ=9, LK=None, D=16, dtype=torch.float32):
    shapes = [(B, H, LQ, D), *[(B, HKV or H, LK or LQ, D)] * 2]
    return [laid_out(s, "contiguous", device=device, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


def exact_gradients(q, k, v, causal, dout, scale=None):
    """Return the output and the gradients of q, k and v, from the reference in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = _formula.attend(*leaves, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return out, *torch.autograd.grad(out, leaves, dout.double())


def assert_near(got, exact):
    """Compare within the rounding of probabilities and their gradients to half precision."""
    for ours, theirs in zip(got, exact, strict=True):
        tolerance = 3e-5 if ours.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_a_convex_combination_of_values(form, causal, device):
    q, k, v = drawn(device, LQ=30, LK=40)
    constant = v[:, :, :1].expand_as(v)
    torch.testing.assert_close(run(form, q, k, constant, causal), constant[:, :, :30])
    out = run(form, 5 * q, k, v, causal)
    assert (out <= v.amax(2, keepdim=True) + 1e-6).all()
    assert (out >= v.amin(2, keepdim=True) - 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_keys_does_not_matter(form, device):
    q, k, v = drawn(device, LQ=20, LK=70)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(device)
    torch.testing.assert_close(run(form, q, k[:, :, order], v[:, :, order], False), run(form, q, k, v, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_causal_does_not_see_the_future(form, dtype, device):
    q, k, v = drawn(device, LQ=150, LK=170, dtype=dtype)
    now = 69
    out = run(form, q, k, v, True)
    for t in (q, k, v):
        t[:, :, now + 1 :] = 100.0
    changed = run(form, q, k, v, True)
    torch.testing.assert_close(changed[:, :, : now + 1], out[:, :, : now + 1])
    torch.testing.assert_close(out[:, :, 0], drawn(device, LQ=150, LK=170, dtype=dtype)[2][:, :, 0])


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_independent_and_groups_share_keys(form, device):
    q, k, v = drawn(device, B=2, H=6, HKV=2, LQ=20, LK=30)
    out = run(form, q, k, v, True)
    torch.testing.assert_close(out, run(form, q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), True))
    torch.testing.assert_close(out[1:, 4:5], run(form, q[1:, 4:5], k[1:, 1:], v[1:, 1:], True))


@pytest.mark.parametrize("form", FORMS)
def test_large_scores(form, device):
    q, k, v = drawn(device, LQ=20, LK=150)
    exact = module.reference(1000 * q.double(), k.double(), v.double(), False)
    torch.testing.assert_close(run(form, 1000 * q, k, v, False).double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_and_gradients_of_any_length(lengths, causal, dtype, device):
    LQ, LK = lengths
    q, k, v = [t.requires_grad_() for t in drawn(device, LQ=LQ, LK=LK, dtype=dtype)]
    out = run("triton", q, k, v, causal)
    dout = laid_out(tuple(out.shape), "contiguous", device=device, dtype=dtype, seed=7)
    got = out, *torch.autograd.grad(out, (q, k, v), dout)
    assert_near(got, exact_gradients(q, k, v, causal, dout))


def test_a_nan_in_an_incoming_gradient_does_not_reach_hidden_keys(device):
    q, k, v = [t.requires_grad_() for t in drawn(device, H=2, HKV=1, LQ=90)]
    out = run("triton", q, k, v, True)
    dout = laid_out(tuple(out.shape), "contiguous", device=device, seed=7)
    dout[:, :, 40] = torch.nan
    (dk,) = torch.autograd.grad(out, k, dout)
    dout[:, :, 40] = 0.0
    assert dk[:, :, :41].isnan().all()
    assert_near((dk[:, :, 41:],), (exact_gradients(q, k, v, True, dout)[2][:, :, 41:],))


@pytest.mark.parametrize("D", [1, 40, 64, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_and_gradients_of_any_head(D, dtype, device):
    q, k, v = [t.requires_grad_() for t in drawn(device, H=2, HKV=1, LQ=33, LK=40, D=D, dtype=dtype)]
    out = run("triton", q, k, v, True)
    dout = laid_out(tuple(out.shape), "contiguous", device=device, dtype=dtype, seed=7)
    assert_near((out, *torch.autograd.grad(out, (q, k, v), dout)), exact_gradients(q, k, v, True, dout))


@pytest.mark.parametrize("cached", [1, 2 * 33, 4 * 65])  # rows in the L2: one head, 4 of 6, or 2 of 3 key heads
def test_any_order_of_programs(cached, device, monkeypatch):
    q, k, v = [t.requires_grad_() for t in drawn(device, H=6, HKV=3, LQ=65, LK=33)]
    monkeypatch.setitem(_operators.L2_SHARE, q.get_device(), cached * 2 * q.shape[3] * q.element_size())
    out = run("triton", q, k, v, True)
    dout = laid_out(tuple(out.shape), "contiguous", device=device, seed=7)
    assert_near((out, *torch.autograd.grad(out, (q, k, v), dout)), exact_gradients(q, k, v, True, dout))


@few_examples
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    causal=st.booleans(),
    layout=layouts,
)
def test_any_shape_and_layout(heads, sizes, causal, layout, device, fast_path):
    (H, HKV), (B, LQ, LK, D) = heads, sizes
    q = laid_out((B, H, LQ, D), layout, device=device)
    k, v = (laid_out((B, HKV, LK, D), layout, device=device, seed=seed) for seed in (1, 2))
    got = tw.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=H != HKV)
    assert_right(got, module.reference, q, k, v, causal)


def test_interleaved_heads_are_not_copied(device, fast_path):
    """[B, L, H, D] viewed as [B, H, L, D], sliced from one projection: the output has the layout of the query."""
    projected = laid_out((2, 30, 3, 4, 16), "contiguous", device=device)
    q, k, v = (projected[:, :, i].transpose(1, 2) for i in range(3))
    assert _operators._rows(q) is q
    out = tw.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, module.reference(q, k, v, True))
    assert tw.scaled_dot_product_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v).stride() == (
        30 * 4 * 16, 16, 4 * 16, 1,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "expanded"])
def test_gradients_of_any_layout(layout, device, fast_path):
    q, k, v = (laid_out((2, 2, 9, 6), layout, device=device, seed=seed).requires_grad_() for seed in range(3))
    out = tw.scaled_dot_product_attention(q, k, v)
    dout = laid_out(tuple(out.shape), layout, device=device, seed=7)
    assert_near((out, *torch.autograd.grad(out, (q, k, v), dout)), exact_gradients(q, k, v, False, dout))


@pytest.mark.parametrize("scale", [None, 0.01, 0.25, 3.0])
def test_scale(scale, device, fast_path):
    q, k, v = [t.requires_grad_() for t in drawn(device, LQ=20, LK=30)]
    out = tw.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    dout = laid_out(tuple(out.shape), "contiguous", device=device, seed=7)
    got = out, *torch.autograd.grad(out, (q, k, v), dout)
    assert_near(got, exact_gradients(q, k, v, True, dout, scale))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))


@pytest.mark.parametrize("form", ["gluon-cooperative", "gluon-pingpong", "gluon-overlapped"])
@pytest.mark.parametrize("causal", [False, True])
def test_specialized_warps(form, causal, device):
    """Values, and in the interpreter barriers and races; three blocks of keys pass through two slots."""
    q, k, v = drawn(device, H=2, HKV=1, LQ=256 if causal else 128, LK=384, D=64, dtype=torch.bfloat16)
    assert module.op.kernels[form].fits(q, k, v, causal)
    assert_near([run(form, q, k, v, causal)], exact_gradients(*(t.requires_grad_() for t in (q, k, v)), causal, q)[:1])


@pytest.mark.parametrize("D", [64, 96])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_specialized_warps_take_whole_blocks_in_order(D, layout, device):
    q, k, v = (laid_out((1, 1, n, D), layout, device=device, dtype=torch.bfloat16) for n in (128, 256, 256))
    fits = module.op.kernels["gluon-overlapped"].fits
    assert fits(q, k, v, False) is (D == 64 and layout == "contiguous")
    assert not fits(q[:, :, :64].contiguous(), k, v, False)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_of_some_inputs(wanted, device):
    args = [t.requires_grad_(wants) for t, wants in zip(drawn(device), wanted, strict=True)]
    run("triton", *args, True).sum().backward()
    ours = [t.grad for t in args]
    assert [t is not None for t in ours] == list(wanted)
    theirs = exact_gradients(*args, True, torch.ones_like(args[0]))[1:]
    assert_near([t for t in ours if t is not None], [t for t, wants in zip(theirs, wanted, strict=True) if wants])


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("causal", [False, True])
def test_double_backward(causal, wanted, device):
    args = [t.requires_grad_(wants) for t, wants in zip(drawn(device, H=2, HKV=1, LQ=4, D=3), wanted, strict=True)]
    leaves = [t for t in args if t.requires_grad]

    def twice(form):
        first = torch.autograd.grad(run(form, *args, causal).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.testing.assert_close(twice("triton"), twice("eager"), rtol=1e-4, atol=1e-5)


def test_double_backward_with_one_tensor_as_every_input(device):
    x = drawn(device, LQ=4, D=3)[0].requires_grad_()

    def twice(form):
        (first,) = torch.autograd.grad(run(form, x, x, x, True).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    torch.testing.assert_close(twice("triton"), twice("eager"), rtol=1e-3, atol=1e-3)


def torch_takes(device):
    q, k, v = drawn(device, B=2, H=4, LQ=6, LK=8)
    few = k[:, :2], v[:, :2]
    mask = torch.ones(6, 8, dtype=torch.bool, device=device).tril(1)
    nothing = torch.randn(2, 4, 0, 16, device=device)
    yield "three dimensions", (q[0], k[0], v[0]), {"is_causal": True}
    yield "five dimensions", (q[None], k[None], v[None]), {}
    yield "mask", (q, k, v), {"attn_mask": mask}
    yield "other value size", (q, k, v[..., :5]), {}
    yield "one batch of keys", (q, k[:1], v[:1]), {}
    yield "no query", (nothing, k, v), {}
    yield "no key", (q, nothing, nothing), {}
    yield "no batch", (q[:0], k[:0], v[:0]), {}
    yield "no head size", (q[..., :0], k[..., :0], v[..., :0]), {"scale": 1.0}
    yield "grouped", (q, *few), {"enable_gqa": True}
    yield "grouped, causal", (q, *few), {"enable_gqa": True, "is_causal": True}
    yield "large head", [t.repeat(1, 1, 1, 17) for t in (q, k, v)], {}
    yield "negative scale", (q, k, v), {"scale": -1.0}
    yield "float64", [t.double() for t in (q, k, v)], {"is_causal": True}
    yield "more queries than keys", (k, q, q), {"is_causal": True}
    yield "more queries than keys, other value size", (k, q, q[..., :5]), {"is_causal": True, "scale": 0.3}
    empty_row = mask & (torch.arange(6, device=device) > 1)[:, None]
    yield "mask that hides all keys of a row", (q, k, v), {"attn_mask": empty_row}
    yield "mask per batch, grouped", (q, *few), {"attn_mask": mask.expand(2, 1, 6, 8), "enable_gqa": True}
    yield "mask, causal", (q, k, v), {"attn_mask": mask, "is_causal": True}
    yield "mask of keys", (q, k, v), {"attn_mask": mask[2:3]}
    yield "additive mask", (q, k, v), {"attn_mask": torch.randn(4, 6, 8, device=device), "scale": 0.7}
    yield (
        "additive mask of -inf",
        (q, k, v),
        {"attn_mask": torch.zeros(6, 8, device=device).masked_fill(~mask, -math.inf)},
    )
    yield "additive mask of five dimensions", (q[None], k[None], v[None]), {"attn_mask": torch.ones(1, 1, 1, 6, 8)}


@pytest.mark.parametrize("name", [name for name, *_ in torch_takes("cpu")])
def test_accepts_what_torch_accepts(name, device, fast_path):
    args, options = next((args, options) for known, args, options in torch_takes(device) if known == name)
    ours = tw.scaled_dot_product_attention(*args, **options)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*args, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mask per batch, grouped", "additive mask", "other value size"])
def test_masks_and_value_sizes_run_our_kernel(name, device, fast_path, monkeypatch):
    args, options = next((args, options) for known, args, options in torch_takes(device) if known == name)
    expected = F.scaled_dot_product_attention(*args, **options)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    torch.testing.assert_close(tw.scaled_dot_product_attention(*args, **options), expected, rtol=1e-5, atol=1e-5)


def test_an_additive_mask_has_a_gradient(device, fast_path):
    q, k, v = drawn(device, B=2, H=3, LQ=6, LK=8)
    mask = torch.randn(3, 1, 8, device=device, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(attend(q, k, v, attn_mask=mask).square().sum(), mask)[0]
        for attend in (tw.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_errors_match_torch(device, fast_path):
    q, k, v = drawn(device, H=4, LQ=6)
    mask = torch.ones(6, 6, device=device)
    for options in ({"attn_mask": mask[:, :5]}, {"attn_mask": mask.double()}):
        with pytest.raises(RuntimeError):
            tw.scaled_dot_product_attention(q, k, v, **options)
    for args in ((q, k[..., :5], v), (q, k.half(), v), (q, k[:, :3], v), (q, k[:, :2], v[:, :2])):
        with pytest.raises(RuntimeError):
            tw.scaled_dot_product_attention(*args)
    with pytest.raises(RuntimeError):
        tw.scaled_dot_product_attention(q, k[:, :3], v[:, :3], enable_gqa=True)


def test_dropout_goes_to_torch(device, fast_path):
    q, k, v = drawn(device, LQ=6)
    torch.manual_seed(3)
    ours = tw.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert not torch.allclose(ours, module.reference(q, k, v, False))


def test_our_kernel_runs_only_where_it_wins(device, monkeypatch):
    q, k, v = drawn(device, LQ=6, LK=8)
    calls = []
    monkeypatch.setattr(module, "attention_forward", lambda *args: calls.append(args) or (q, q))
    tw.scaled_dot_product_attention(q, k, v)
    assert not calls
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(6 * 8))
    tw.scaled_dot_product_attention(q, k, v, is_causal=True, scale=2.0)
    assert calls == [(q, k, v, True, 2.0)]


def test_autocast_matches_torch(device, fast_path):
    q, k, v = drawn(device)
    with torch.autocast(device, dtype=torch.float16):
        assert tw.scaled_dot_product_attention(q, k, v).dtype == F.scaled_dot_product_attention(q, k, v).dtype


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_transforms_match_torch(device, fast_path):
    q, k, v = drawn(device, B=3)
    ours = torch.func.vmap(tw.scaled_dot_product_attention)(q[:, None], k[:, None], v[:, None])
    torch.testing.assert_close(ours[:, 0], F.scaled_dot_product_attention(q, k, v))


def test_registered_operators(device):
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in drawn(device, H=3, HKV=3, LQ=4, LK=2, D=5))
    torch.library.opcheck(module.attention_forward, (q, k, v, True, 0.3))
    assert [t.requires_grad for t in module.attention_forward(q, k, v, True, 0.3)] == [True, False]
    with torch.no_grad():
        q, k, v = (laid_out((1, 4, 3, 5), layout, device=device) for layout in ("transposed", "expanded", "sliced"))
        out, lse = module.attention_forward(q, k, v, True, 0.3)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(module.attention_forward, (q, k, v, True, 0.3), test_utils=checks)
        for wanted in ((True, True), (True, False), (False, True)):
            args = (q, k, v, out, lse, out, True, 0.3, *wanted)
            torch.library.opcheck(_operators.attention_backward, args, test_utils=checks)


def test_compiles_to_one_graph(device, fast_path):
    q, k, v = drawn(device)
    fn = lambda q, k, v: tw.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v, is_causal=True)
    assert_compiles(fn, q[0, :, None], k[0, :, None], v)
    assert_compiles(lambda *args: tw.scaled_dot_product_attention(*args, scale=0.5), q, k, v)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_cost_counts_visible_pairs(lengths, causal):
    LQ, LK = lengths
    q, k, v = drawn("cpu", B=2, H=3, LQ=LQ, LK=LK, D=8)
    seen = torch.ones(LQ, LK).tril() if causal else torch.ones(LQ, LK)
    pairs = 2 * 3 * int(seen.sum())
    cost = module.cost(q, k, v, causal)
    assert cost.flops["special"] == pairs
    assert sum(cost.flops.values()) == pairs + 4 * 8 * pairs
    assert module.backward_cost(q, k, v, causal).read - cost.read == 2 * q.nbytes + 4 * 2 * 3 * LQ


def test_vendor_kernels_are_called_only_with_supported_inputs():
    def fits(kernel, dtype=torch.float16, causal=True, **sizes):
        q, k, v = drawn("cpu", dtype=dtype, **sizes)
        return module.op.kernels[kernel].fits(q, k, v, causal)

    for kernel, largest in (("sdpa-flash", 256), ("sdpa-cudnn", 128)):
        assert fits(kernel, D=largest)
        assert not fits(kernel, D=largest + 8)
        assert not fits(kernel, D=12)
        assert not fits(kernel, dtype=torch.float32)
        assert not fits(kernel, LQ=8, LK=9)
        assert fits(kernel, LQ=8, LK=9, causal=False)
    assert not fits("sdpa-cudnn", LQ=1, LK=1)


@pytest.mark.gpu
def test_tf32_only_when_torch_allows_it(device, monkeypatch):
    q, k, v = drawn(device, LQ=256, D=64)
    exact = module.reference(q.double(), k.double(), v.double(), False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert (run("triton", q, k, v, False) - exact).abs().max() < 1e-5
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert (run("triton", q, k, v, False) - exact).abs().max() > 1e-5


@pytest.mark.gpu
def test_results_are_deterministic(device):
    q, k, v = [t.requires_grad_() for t in drawn(device, H=8, HKV=2, LQ=1000, D=64, dtype=torch.bfloat16)]
    results = []
    for _ in range(3):
        out = run("triton", q, k, v, True)
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
