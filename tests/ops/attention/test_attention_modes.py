"""Attention with modes: laws, values and gradients of every mode against the formula in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
import triton

from support import assert_compiles, laid_out
from tilewright.ops.attention import _block_mask, _formula, _modes, _mods
from tilewright.ops.attention import attention_modes as module
from tilewright.ops.attention.attention_modes import attention
from tilewright.workbench.audit import audit
from tilewright.workbench.check.budget import Mismatch, compare, expect

DOCUMENTS = ([0, 6, 6, 7, 40], [0, 9, 12, 33, 33])  # one empty, one of length 1, one without keys


def drawn(device, B=1, H=2, HKV=None, LQ=40, LK=33, D=16, DV=None, dtype=torch.float32):
    shapes = (B, H, LQ, D), (B, HKV or H, LK, D), (B, HKV or H, LK, DV or D)
    return [laid_out(s, "contiguous", device=device, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


def soft(score, b, h, q_idx, kv_idx):
    bent = torch.sigmoid(score) * torch.exp(-score / 4) + torch.sqrt(torch.square(score) + 1)
    bent = torch.maximum(bent - torch.log(2 + abs(score)), 0.3 + 0 * score)
    return torch.where((q_idx + kv_idx) % 3 == 0, bent, torch.sin(score) * (1 + h) - 0.1 * b)


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % (2 + h) == 0) | (kv_idx // 4 == 0)


def every_mode(device):
    """Yield a name, options of `attention`, and sizes. Floating-point tensors need gradients."""
    randn = lambda *shape: laid_out(shape, "contiguous", device=device, seed=9)
    yield "top left", {"causal": "top-left"}, {}
    yield "bottom right, fewer keys", {"causal": "bottom-right"}, {}
    yield "bottom right, more keys", {"causal": "bottom-right"}, {"LQ": 33, "LK": 70}
    yield "window", {"window": (7, 3)}, {"LK": 90}
    yield "causal window", {"causal": True, "window": (5, -1)}, {"B": 2, "HKV": 1}
    yield "value size", {"causal": True}, {"D": 24, "DV": 40}
    yield "softcap", {"softcap": 1.5}, {"HKV": 1}
    yield "negative scale", {"scale": -0.4, "return_lse": True}, {}
    yield "bias", {"bias": randn(1, 2, 40, 33), "causal": True}, {}
    yield "bias per key", {"bias": randn(2, 1, 1, 33)}, {"B": 2, "HKV": 1}
    yield "bias per query", {"bias": randn(40, 1)}, {"B": 2}
    yield "bias per head", {"bias": randn(2, 1, 1)}, {"B": 2}
    yield "bias of -inf", {"bias": randn(40, 33).masked_fill(randn(40, 33) > 0, -math.inf)}, {}
    yield "mask", {"mask": (randn(1, 2, 40, 33) > 1.5)}, {"HKV": 1}
    yield "alibi", {"alibi_slopes": randn(2).abs() / 9}, {"B": 2}
    yield "alibi per batch", {"alibi_slopes": randn(2, 2).abs() / 9, "causal": "bottom-right"}, {"B": 2}
    yield "sinks", {"sinks": randn(2), "causal": "bottom-right"}, {"HKV": 1}
    yield "dropout", {"dropout_p": 0.3, "seed": 5, "causal": True}, {"HKV": 1}
    yield "score_mod", {"score_mod": soft}, {"B": 2}
    yield "mask_mod", {"mask_mod": dilated, "causal": "bottom-right"}, {"LQ": 70, "LK": 90, "HKV": 1}
    packed = {"cu_seqlens_q": DOCUMENTS[0], "cu_seqlens_k": DOCUMENTS[1]}
    yield "documents", packed, {"HKV": 1}
    yield "documents, window, alibi", packed | {"window": (3, 2), "alibi_slopes": randn(2).abs()}, {"B": 2}
    yield "documents, mask_mod", packed | {"mask_mod": dilated, "causal": "bottom-right"}, {}
    everything = {
        "bias": randn(2, 1, 33),
        "softcap": 2.0,
        "sinks": randn(2),
        "score_mod": soft,
        "dropout_p": 0.2,
        "seed": 1,
    }
    yield "everything", packed | everything | {"alibi_slopes": randn(2), "mask": randn(40, 33) > -1}, {}


NAMES = [name for name, *_ in every_mode("cpu")]


def formula(q, k, v, options, kept=None):
    """Return output and lse by the formula of the Op, for options of `attention`."""
    tensors = [options.get(name) for name in ("bias", "mask", "alibi_slopes", "sinks")]
    names = (
        "causal",
        "window",
        "softcap",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "dropout_p",
        "scale",
        "score_mod",
        "mask_mod",
    )
    modes, documents = module._parse(q, k, **{name: options[name] for name in names if name in options})
    sees = None if documents is None else _formula.seen(q.shape[2], k.shape[2], modes, documents)
    return _formula.attend_with_modes(q, k, v, *tensors, sees, kept, modes)


def kept_by(options, q, k):
    if not options.get("dropout_p"):
        return None
    return _modes.dropout_kept(
        torch.tensor([options["seed"]], device=q.device), (*q.shape[:3], k.shape[2]), options["dropout_p"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_output_lse_and_gradients(name, device):
    options, sizes = next((options, sizes) for known, options, sizes in every_mode(device) if known == name)
    named = [key for key, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    q, k, v = drawn(device, **sizes)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *(options[key] for key in named))]
    out, lse = attention(*leaves[:3], **options | dict(zip(named, leaves[3:], strict=True)) | {"return_lse": True})
    grads = [laid_out(tuple(x.shape), "contiguous", device=device, seed=n) for n, x in enumerate((out, lse))]
    grads[1].masked_fill_(lse == -math.inf, 0.0)
    got = [out, lse, *torch.autograd.grad([out, lse], leaves, grads)]
    assert all(torch.isfinite(x).all() for n, x in enumerate(got) if n != 1)

    kept = kept_by(options, q, k)
    reference = lambda q, k, v, *given: formula(q, k, v, options | dict(zip(named, given, strict=True)), kept)
    expected = expect(reference, leaves, grads, {n: str(n) for n in range(len(leaves))})
    for tensor, wanted in zip(got, expected, strict=True):
        found = compare(tensor.detach(), wanted)
        assert not isinstance(found, Mismatch), found.reason


@pytest.mark.parametrize("hides", ["causal", "mask", "mask_mod"])
def test_a_nan_in_an_incoming_gradient_does_not_reach_the_bias_of_hidden_pairs(hides, device):
    past = torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    options = {"causal": "top-left", "mask": past, "mask_mod": lambda b, h, i, j: j <= i}
    bias = laid_out((2, 40, 40), "contiguous", device=device, seed=9)
    leaves = [x.requires_grad_() for x in (*drawn(device, LK=40), bias)]
    out = attention(*leaves[:3], bias=bias, **{hides: options[hides]})
    dout = laid_out(tuple(out.shape), "contiguous", device=device, seed=7)
    dout[:, :, 20] = torch.nan
    (dbias,) = torch.autograd.grad(out, bias, dout, retain_graph=True)
    dout[:, :, 20] = 0.0
    (finite,) = torch.autograd.grad(out, bias, dout)
    is_nan = torch.zeros_like(past)
    is_nan[20, :21] = True
    assert torch.equal(dbias.isnan(), is_nan.expand(2, -1, -1))
    torch.testing.assert_close(dbias[:, ~is_nan], finite[:, ~is_nan])


@pytest.mark.parametrize("hides", ["causal", "mask", "mask_mod"])
def test_a_nan_in_an_incoming_gradient_does_not_reach_hidden_keys(hides, device):
    past = torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    options = {"causal": "top-left", "mask": past, "mask_mod": lambda b, h, i, j: j <= i}
    q, k, v = (x.requires_grad_() for x in drawn(device, LK=40))
    out = attention(q, k, v, return_lse=True, **{hides: options[hides]})[0]
    dout = laid_out(tuple(out.shape), "contiguous", device=device, seed=7)
    dout[:, :, 20] = torch.nan
    (dk,) = torch.autograd.grad(out, k, dout, retain_graph=True)
    dout[:, :, 20] = 0.0
    (finite,) = torch.autograd.grad(out, k, dout)
    assert dk[:, :, :21].isnan().all()
    torch.testing.assert_close(dk[:, :, 21:], finite[:, :, 21:])


@pytest.mark.parametrize("name", ["window", "documents", "softcap", "mask_mod"])
def test_half_precision(name, device):
    options, sizes = next((options, sizes) for known, options, sizes in every_mode(device) if known == name)
    leaves = [x.requires_grad_() for x in drawn(device, **sizes, dtype=torch.bfloat16)]
    out = attention(*leaves, **options)
    dout = laid_out(tuple(out.shape), "contiguous", device=device, dtype=out.dtype, seed=7)
    got = out, *torch.autograd.grad(out, leaves, dout)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = formula(*wide, options)[0]
    for ours, theirs in zip(got, (exact, *torch.autograd.grad(exact, wide, dout.double())), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)


def test_a_query_sees_only_its_window(device):
    """Whatever lies outside changes nothing; the last visible key on each side changes its row."""
    q, k, v = drawn(device, LQ=70, LK=90)
    out = attention(q, k, v, window=(9, 4))
    for key, is_seen in ((70 - 50 + 20 - 10, False), (31, True), (44, True), (45, False)):
        value = v.clone()
        value[:, :, key] = 100.0
        changed = attention(q, k, value, window=(9, 4))[:, :, 20]  # its center is key 40
        assert torch.equal(changed, out[:, :, 20]) is not is_seen, key


@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
def test_the_future_changes_nothing(causal, device):
    q, k, v = drawn(device, LQ=40, LK=50)
    last = 25 if causal == "top-left" else 35  # what query 25 sees
    later = [torch.cat([x[:, :, : last + 1], 9 * x[:, :, last + 1 :]], 2) for x in (k, v)]
    out, changed = (attention(q, *kv, causal=causal, softcap=3.0) for kv in ((k, v), later))
    assert torch.equal(out[:, :, :26], changed[:, :, :26])
    assert not torch.equal(out[:, :, 26], changed[:, :, 26])


def test_parts_of_the_keys_are_merged_by_their_lse(device):
    q, k, v = drawn(device, LK=70)
    slopes = torch.tensor([0.1, 0.3], device=device)
    parts = [slice(0, 33), slice(33, 70)]
    biases = [torch.full((1, 70), -math.inf, device=device) for _ in parts]
    for bias, part in zip(biases, parts, strict=True):
        bias[:, part] = 0.0
    options = {"alibi_slopes": slopes, "window": (30, 20), "return_lse": True}
    (first, one), (second, other) = (attention(q, k, v, bias=bias, **options) for bias in biases)
    lse = torch.logaddexp(one, other)
    merged = first * torch.exp(one - lse)[..., None] + second * torch.exp(other - lse)[..., None]
    torch.testing.assert_close((merged, lse), attention(q, k, v, **options))


def test_the_order_of_keys_does_not_matter_without_positions(device):
    q, k, v = drawn(device, LK=70)
    bias, mask = (
        laid_out((40, 70), "contiguous", device=device),
        laid_out((40, 70), "contiguous", device=device, seed=1) > 0,
    )
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(device)
    out = attention(q, k, v, bias=bias, mask=mask, softcap=3.0)
    again = attention(q, k[:, :, order], v[:, :, order], bias=bias[:, order], mask=mask[:, order], softcap=3.0)
    torch.testing.assert_close(again, out)


def test_the_same_mask_in_every_form(device):
    q, k, v = drawn(device, LQ=50, LK=70)
    i, j = torch.arange(50, device=device)[:, None], torch.arange(70, device=device)
    center = i + 20
    seen = (j >= center - 6) & (j <= center)
    expected = attention(q, k, v, mask=seen)
    torch.testing.assert_close(attention(q, k, v, causal="bottom-right", window=(6, None)), expected)
    torch.testing.assert_close(attention(q, k, v, bias=torch.where(seen, 0.0, -math.inf)), expected)
    inside = lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx + 14) & (kv_idx <= q_idx + 20)
    torch.testing.assert_close(attention(q, k, v, mask_mod=inside), expected)
    hides = lambda score, b, h, q_idx, kv_idx: torch.where(inside(b, h, q_idx, kv_idx), score, -math.inf)
    torch.testing.assert_close(attention(q, k, v, score_mod=hides), expected)


def test_the_same_bias_in_every_form(device):
    q, k, v = drawn(device)
    slopes = torch.tensor([0.25, 0.5], device=device)
    distance = (torch.arange(40, device=device)[:, None] - 7 - torch.arange(33, device=device)).abs()
    expected = attention(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(attention(q, k, v, bias=-slopes[:, None, None] * distance), expected)
    alibi = lambda score, b, h, q_idx, kv_idx: score - 0.25 * (h + 1) * abs(q_idx - 7 - kv_idx)
    torch.testing.assert_close(attention(q, k, v, score_mod=alibi), expected)


def test_packed_documents_are_separate_calls(device):
    q, k, v = drawn(device, HKV=1)
    options = {"causal": "bottom-right", "window": (8, 0), "alibi_slopes": torch.tensor([0.1, 0.2], device=device)}
    out, lse = attention(q, k, v, cu_seqlens_q=DOCUMENTS[0], cu_seqlens_k=DOCUMENTS[1], return_lse=True, **options)
    for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, DOCUMENTS), strict=True):
        alone = attention(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], return_lse=True, **options)
        torch.testing.assert_close((out[:, :, q0:q1], lse[:, :, q0:q1]), alone)


def test_lengths_past_the_end_reach_no_memory(device):
    """Lengths on a GPU are not read, so that nothing can refuse them."""
    cumulative = [torch.tensor(x, device=device) for x in ([0, 6, 99], [0, 30, 99])]
    begin, end, _ = _formula.seen(40, 33, _formula.Modes(1.0, left=50, right=50), cumulative)
    assert all(bool(((x >= 0) & (x <= 33)).all()) for x in (begin, end))


def test_groups_share_keys_and_a_sink_is_a_key_of_value_zero(device):
    q, k, v = drawn(device, H=4, HKV=2)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse = attention(q, k, v, sinks=sinks, window=(20, 9), return_lse=True)
    repeated = attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), sinks=sinks, window=(20, 9))
    torch.testing.assert_close(repeated, out)
    plain, plain_lse = attention(q, k, v, window=(20, 9), return_lse=True)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None].expand_as(lse)))
    torch.testing.assert_close(out, plain * torch.exp(plain_lse - lse)[..., None].nan_to_num(0.0))


def test_rows_that_see_nothing_are_zero(device):
    q, k, v = [x.requires_grad_() for x in drawn(device, LQ=50, LK=20)]
    out, lse = attention(q, k, v, causal="bottom-right", return_lse=True)
    assert torch.equal(out[:, :, :30], torch.zeros_like(out[:, :, :30]))
    assert (lse[:, :, :30] == -math.inf).all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq[:, :, :30], torch.zeros_like(dq[:, :, :30]))
    nothing = torch.zeros(50, 20, dtype=torch.bool, device=device)
    hidden = attention(q, k, v, mask=nothing)
    assert all(not x.any() for x in (hidden, *torch.autograd.grad(hidden.sum(), (q, k, v))))


def test_gradients_of_hidden_keys_are_exactly_zero(device):
    q, k, v = [x.requires_grad_() for x in drawn(device, LQ=20, LK=40)]
    for options in ({"causal": "top-left"}, {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < 20}):
        gradients = torch.autograd.grad(attention(q, k, v, return_lse=True, **options)[0].sum(), (k, v))
        assert all(not x[:, :, 20:].any() for x in gradients)
        assert all(x[:, :, :20].any() for x in gradients)


def test_extreme_scores(device):
    q, k, v = drawn(device, LQ=20, LK=50)
    out, lse = attention(1000 * q, 10 * k, v, window=(30, 30), return_lse=True)
    exact, exact_lse = formula(1000 * q.double(), 10 * k.double(), v.double(), {"window": (30, 30)})
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


def test_empty_and_single_sequences(device):
    for LQ, LK in ((0, 3), (3, 0), (1, 1)):
        q, k, v = drawn(device, LQ=LQ, LK=LK)
        out, lse = attention(q, k, v, window=(2, 2), return_lse=True)
        expected = v if LK == 1 else torch.zeros_like(q)
        assert torch.equal(out, expected)
        assert lse.shape == (1, 2, LQ)


def test_dropout_replays_and_keeps_the_mean(device):
    q, k, v = drawn(device, LQ=33, LK=64)
    once = attention(q, k, v, dropout_p=0.5, seed=3)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, seed=torch.tensor(3)), once)
    assert not torch.equal(attention(q, k, v, dropout_p=0.5, seed=4), once)
    with _modes.BLOCKS.override(("fwd", 4, 64, True, 1), _modes._blocks(16, 32, 4, 1)):
        torch.testing.assert_close(attention(q, k, v, dropout_p=0.5, seed=3), once)
    kept = _modes.dropout_kept(torch.tensor([3], device=device), (4, 4, 64, 64), 0.3)
    assert abs(kept.float().mean() - 0.7) < 0.01
    for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # no batch, head, query or key is special
        assert (kept.float().mean(dims) - 0.7).abs().max() < 0.12


def test_dropout_of_one_query(device):
    """A probability is kept by its place alone."""
    seed = torch.tensor([3], device=device)
    one, some = (_modes.dropout_kept(seed, (1, 2, n, 40), 0.5) for n in (1, 4))
    assert torch.equal(one, some[:, :, :1])
    assert one.any()
    assert not one.all()


def test_a_drawn_seed_follows_torchs(device):
    q, k, v = drawn(device, LQ=9)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(attention(q, k, v, dropout_p=0.5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def visits(fn):
    """Return how many bytes of k a call loads."""
    return sum(launch.arguments["k_ptr"].loaded for launch in audit(fn).launches if "k_ptr" in launch.arguments)


def test_only_visible_blocks_are_visited(device):
    if device == "cuda":
        pytest.skip("traffic is counted by the interpreter")
    q, k, v = drawn(device, H=1, LQ=256, LK=256)
    row = k.nbytes // 256
    with _modes.BLOCKS.override(("fwd", 4, 64, True, 0), _modes._blocks(32, 32, 4, 1)):
        cu = [0, 64, 256]
        local = lambda b, h, q_idx, kv_idx: q_idx // 64 == kv_idx // 64
        for blocks, options in (
            (64, {}),
            (36, {"causal": "bottom-right", "softcap": None, "window": (None, 0)}),
            (8 + 7 + 6, {"causal": "bottom-right", "window": (33, 0)}),
            (2 * 2 + 6 * 6, {"cu_seqlens_q": cu, "cu_seqlens_k": cu}),
            (8 * 2, {"mask_mod": local}),
            (4 * 3, {"mask_mod": local, "causal": "bottom-right"}),
        ):
            found = visits(lambda options=options: attention(q, k, v, return_lse=True, **options))
            assert found == blocks * 32 * row, options


def test_no_score_reaches_memory(device):
    """The stores of a call are its results; those of backward also one number per row, and one per row and slope."""
    if device == "cuda":
        pytest.skip("traffic is counted by the interpreter")
    bias = torch.zeros(2, 1, 70, requires_grad=True)
    options = {"softcap": 2.0, "bias": bias, "window": (40, 9), "dropout_p": 0.1, "seed": 1, "causal": True}
    leaves = [x.requires_grad_() for x in drawn(device, LQ=70, LK=70)]
    found = audit(lambda: attention(*leaves, return_lse=True, **options))
    out, lse = found.result
    stored = lambda audited: sum(t.stored for launch in audited.launches for t in launch.arguments.values())
    assert stored(found) == out.nbytes + lse.nbytes
    back = audit(lambda: torch.autograd.grad([out, lse], [*leaves, bias], [torch.ones_like(out), torch.ones_like(lse)]))
    assert stored(back) == sum(x.nbytes for x in (*leaves, bias, lse))


def test_block_lists_hold_what_the_mask_shows(device):
    modes = _formula.Modes(1.0, mask_mod=_mods.mask_mod_key(dilated), right=0)
    shown = formula_mask(modes, 70, 90).to(device)
    for of_keys in (False, True):
        lists = _block_mask.block_lists((3, 2), (70, 90), modes, None, (16, 32), shown.device, of_keys)
        assert lists.blocks.shape[:2] == (1, 2), "the mask depends on the head, not on the batch"
        for h in range(2):
            tiles = F.pad(shown[h], (0, 6, 0, 10)).view(5, 16, 3, 32).float().mean((1, 3))
            tiles = tiles.T if of_keys else tiles
            for row, tile in enumerate(tiles):
                full, partial = lists.counts[0, h, row].tolist()
                listed = lists.blocks[0, h, row].tolist()
                assert {n for n, share in enumerate(tile) if share == 1} == {*listed[:full]}
                assert {n for n, share in enumerate(tile) if 0 < share < 1} == {*listed[full : full + partial]}


def test_a_cuda_graph_computes_its_own_block_lists(device, monkeypatch):
    """The cache may drop the memory that a graph reads, and holds none that a capture has not written."""
    modes = _formula.Modes(1.0, mask_mod=_mods.mask_mod_key(dilated))
    of = (3, 2), (70, 90), modes, None, (16, 32), torch.empty(0, device=device).device, False
    monkeypatch.setattr(_block_mask, "is_captured", lambda: True)
    captured = _block_mask.block_lists(*of)
    monkeypatch.undo()
    kept = _block_mask.block_lists(*of)
    assert kept.blocks is not captured.blocks
    assert torch.equal(kept.counts, captured.counts)
    assert _block_mask.block_lists(*of) is kept


def formula_mask(modes, LQ, LK):
    i, j = torch.arange(LQ)[:, None], torch.arange(LK)
    heads = torch.arange(2)[:, None, None]
    return _mods.mod(modes.mask_mod).on_tensors(0, heads, i, j) & (j <= i + LK - LQ)


@triton.jit
def capped(score, b, h, q_idx, kv_idx):
    return score * 0.5 + (q_idx - kv_idx) * 0.01


@triton.jit
def banded(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < 9)


def test_triton_functions_as_mods(device):
    q, k, v = drawn(device)
    mods = {
        "score_mod": lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01,
        "mask_mod": lambda b, h, i, j: (j <= i) & (i - j < 9),
    }
    out = attention(q, k, v, score_mod=capped, mask_mod=banded)
    torch.testing.assert_close(out, attention(q, k, v, **mods))
    with pytest.raises(TypeError, match="Write it as a Python function"):
        attention(q.requires_grad_(), k, v, score_mod=capped).sum().backward()
    assert _mods.mod(_mods.mask_mod_key(banded)).uses == {"q_idx", "kv_idx"}


def test_a_closure_may_change(device):
    q, k, v = drawn(device, LQ=9)
    for factor in (0.5, 2.0):
        out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s * factor)  # noqa: B023
        torch.testing.assert_close(out, attention(q, k, v, scale=factor / 4, return_lse=True)[0])


def test_integers_in_mods_round_as_in_python(device):
    q, k, v = drawn(device)
    for f in (lambda i, j: (i - j) // 7, lambda i, j: (i - j) % 7, lambda i, j: (j - i) % -5, lambda i, j: (i - j) / 4):
        mod = lambda s, b, h, i, j: s + 0.1 * f(i, j)  # noqa: B023
        torch.testing.assert_close(attention(q, k, v, score_mod=mod), formula(q, k, v, {"score_mod": mod})[0])


@pytest.mark.parametrize(
    ("mod", "error"),
    [
        (lambda s, b, h, i, j: s if i > j else -s, "cannot branch"),
        (lambda s, b, h, i, j: s + torch.ones(3)[0], "cannot read a tensor"),
        (lambda s, b, h, i, j: s + torch.ones(3)[h], "cannot use torch's"),
        (lambda s, b, h, i, j: torch.cumsum(s, 0), "cannot use torch's cumsum"),
        (lambda s, b, h, i, j: s // 2, "has no gradient"),
        (lambda s, b, h, i, j: None, "returns an expression"),
    ],
)
def test_mods_that_cannot_be_compiled(mod, error, device):
    with pytest.raises(TypeError, match=error):
        attention(*drawn(device), score_mod=mod)


@pytest.mark.parametrize(
    "options", [{"softcap": 1.0, "sinks": True, "return_lse": True}, {"dropout_p": 0.4, "seed": 2}]
)
def test_double_backward(options, device):
    leaves = [x.requires_grad_() for x in drawn(device, H=2, HKV=1, LQ=4, LK=5, D=3)]
    sinks = torch.tensor([0.5, -0.5], device=device, requires_grad=True) if "sinks" in options else None
    options = options | {"sinks": sinks, "window": (2, 1)}
    leaves += [sinks] if sinks is not None else []
    kept = kept_by(options, *leaves[:2])

    def twice(fn):
        out = fn()
        out = out[0].sum(-1) * out[1] if isinstance(out, tuple) else out
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    ours = twice(lambda: attention(*leaves[:3], **options))
    plain = lambda: formula(*leaves[:3], options, kept)
    theirs = twice(plain if options.get("return_lse") else lambda: plain()[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_gradients_of_some_inputs(device):
    for wanted in range(3):
        leaves = [x.requires_grad_(n == wanted) for n, x in enumerate(drawn(device, LQ=9, LK=9))]
        attention(*leaves, window=(4, 0)).sum().backward()
        assert [x.grad is not None for x in leaves] == [n == wanted for n in range(3)]


def test_registered_operators(device):
    q, k, v = (x.requires_grad_() for x in drawn(device, HKV=1, LQ=4, LK=6, D=5, DV=3))
    bias = torch.zeros(1, 2, 1, 6, device=device, requires_grad=True)
    modes = _formula.Modes(0.3, left=2, softcap=2.0)
    args = q, k, v, bias, None, None, None, None, None, None, *modes
    torch.library.opcheck(_modes.attention_with_modes.registered, args)
    out, lse = _modes.attention_with_modes.registered(*args)
    wanted = [True, False, True, True, False, False]
    given = [x if x is None else x.detach() for x in (*args[:10], out, lse, out, lse)]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_modes.attention_with_modes_backward.registered, (*given, wanted, *modes), test_utils=checks)


def test_compiles_to_one_graph(device):
    q, k, v = drawn(device, LQ=9, LK=9)
    cu = torch.tensor([0, 4, 9], device=device)
    assert_compiles(
        lambda q, k, v: attention(q, k, v, causal="bottom-right", cu_seqlens_q=cu, cu_seqlens_k=cu), q, k, v
    )
    factor = 0.5
    mods = {"score_mod": lambda s, b, h, i, j: s * factor, "mask_mod": banded}
    assert_compiles(lambda q, k, v: attention(q, k, v, **mods, dropout_p=0.5, seed=1, return_lse=True), q, k, v)


def test_modes_that_torch_has_go_to_torch(device, monkeypatch):
    q, k, v = drawn(device, LQ=9, LK=9)
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(kwargs) or args[0])
    for options in ({}, {"causal": True}, {"causal": "bottom-right"}, {"scale": 2.0}, {"window": (None, -1)}):
        attention(q, k, v, **options)
    assert len(calls) == 5
    attention(q, k[:, :, :5], v[:, :, :5], causal="bottom-right")  # torch's diagonal is at the top left
    attention(q, k, v, return_lse=True)
    assert len(calls) == 5


def test_autocast_goes_to_torch(device):
    q, k, v = drawn(device, LQ=9)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        out = attention(q, k, v, window=(3, 3))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attention(q, k, v, window=(3, 3)), rtol=2e-2, atol=2e-2)


def test_tensors_that_the_kernel_does_not_take(device):
    q, k, v = drawn(device, LQ=9)
    options = {"window": (3, 3), "mask_mod": dilated, "return_lse": True}
    ours = attention(q, k, v, **options)
    wide = attention(*(x.double() for x in (q, k, v)), **options)
    torch.testing.assert_close(tuple(x.float() for x in wide), ours)
    repeated = [attention(*(x.double() for x in (q, k, v)), dropout_p=0.5, seed=1) for _ in range(2)]
    assert torch.equal(*repeated)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"causal": "left"}, "causal must be"),
        ({"cu_seqlens_q": [0, 9]}, "both cu_seqlens_q and cu_seqlens_k"),
        ({"cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 4, 9]}, "same number of documents"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be of shape \[2\]"),
        ({"sinks": torch.ones(1)}, r"sinks must be of shape \[2\]"),
        ({"mask": torch.ones(9, 33)}, "mask must be boolean"),
        ({"dropout_p": 1.0}, "dropout_p must be"),
        ({"window": 4}, "window must be two numbers"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 34]}, "cu_seqlens_k must begin with 0, .* at most 33"),
        ({"cu_seqlens_q": [0, 5, 4], "cu_seqlens_k": [0, 9, 33]}, "cu_seqlens_q must .* never decrease"),
        ({"cu_seqlens_q": torch.ones(2), "cu_seqlens_k": [0, 9]}, "cu_seqlens_q must be integers"),
        ({"bias": torch.ones(2, 1, 5)}, r"bias must broadcast to the scores \[1, 2, 9, 33\]"),
        ({"mask": torch.ones(1, 1, 2, 9, 33) > 0}, "mask must broadcast"),
        ({"bias": torch.ones(9, 33, device="meta")}, "bias is on meta and q on"),
    ],
)
def test_errors_say_what_is_wrong(options, error, device):
    with pytest.raises((ValueError, TypeError), match=error):
        attention(*drawn(device, LQ=9), **options)


def test_shapes_must_fit(device):
    q, k, v = drawn(device, H=4, HKV=3)
    for args in ((q, k, v), (q[0], k[0], v[0]), (q, k[:, :2], v), (q, q[..., :5], q)):
        with pytest.raises(ValueError, match="k"):
            attention(*args)


def test_cost_counts_visible_pairs():
    for mode in ("causal", "window", "both sides", "documents"):
        q, k, v = drawn("cpu", B=2, LQ=40, LK=64)
        i, j = torch.arange(40)[:, None], torch.arange(64)
        center = i + 24
        documents = torch.bucketize(i, torch.tensor([5, 17]), right=True) == torch.bucketize(
            j, torch.tensor([8, 28]), right=True
        )
        center = (
            torch.where(i < 5, i + 3, torch.where(i < 17, i - 5 + 16, i - 17 + 41)) if mode == "documents" else center
        )
        shown = {
            "causal": j <= center,
            "window": (j <= center) & (j >= center - 4),
            "both sides": (j <= center + 4) & (j >= center - 8),
            "documents": (j <= center) & documents,
        }[mode]
        cost = module.cost(q, k, v, None, None, None, None, mode)
        assert cost.flops["special"] == 4 * int(shown.sum()), mode
