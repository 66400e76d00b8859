"""Attention against a KV cache: laws of the kernel, options, and what a call may not read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs

import tilewright as tw
from support import assert_right, few_examples
from tilewright.ops.decode import _splits
from tilewright.ops.decode import decode_attention as module
from tilewright.ops.decode._reference import attend
from tilewright.ops.rope import reference as rotate
from tilewright.runtime.configs import clear_plans
from tilewright.runtime.sizes import cdiv

GARBAGE = -(2**31)


def drawn(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def caches(device, lengths, page=0, HKV=2, D=16, capacity=None, dtype=torch.float32, seed=0):
    """Return k, v, lengths and a block table in random order whose unused entries are garbage; None if page is 0."""
    B, T = len(lengths), capacity or max(1, *lengths)
    each = -(-T // page) if page else 1
    order = torch.randperm(B * each, generator=torch.Generator().manual_seed(seed)).view(B, each).int()
    k, v = (drawn(device, B * each, page or T, HKV, D, dtype=dtype, seed=seed + n) for n in (1, 2))
    known = torch.tensor(lengths, dtype=torch.int32)
    if not page:
        return k, v, known.to(device), None
    order[torch.arange(each) * page >= known[:, None]] = GARBAGE
    return k, v, known.to(device), order.to(device)


def gathered(cache, table, b, length):
    """Return the first `length` tokens of sequence b, [length, HKV, D]."""
    if table is None:
        return cache[b, :length]
    page = cache.shape[1]
    pages = [cache[int(table[b, n])] for n in range(-(-length // page))]
    return torch.cat([*pages, cache[:0].flatten(0, 1)])[:length]


def by_sequence(q, k, v, lengths, table, **options):
    """Attend to each sequence alone, in float64, with its tokens gathered by the host."""
    outs, lses = [], []
    for b, length in enumerate(lengths.tolist()):
        tokens = (gathered(x, table, b, length)[None].double() for x in (k, v))
        out, lse = attend(q[b : b + 1].double(), *tokens, lengths[b : b + 1], q.shape[3] ** -0.5, **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def assert_near(got, exact, tolerance=3e-5):
    for ours, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page", [0, 16, 64, 5])
@pytest.mark.parametrize("lengths", [(0, 1, 200), (3, 700, 64)])
def test_ragged_lengths_equal_dense_attention_on_gathered_tokens(lengths, page, device):
    q = drawn(device, 3, 1, 4, 16)
    k, v, n, table = caches(device, lengths, page)
    got = tw.decode_attention(q, k, v, n, table, return_lse=True)
    assert_near(got, by_sequence(q, k, v, n, table))
    if lengths[0] == 0:
        assert not got[0][0].any()
        assert (got[1][0] == -torch.inf).all()


@few_examples
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (6, 2), (8, 1), (3, 3)]),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 33)),
    page=st.sampled_from([0, 1, 16, 128]),
    layout=st.sampled_from(["NHD", "HND"]),
    options=st.sampled_from([{}, {"causal": False}, {"window": 7}, {"softcap": 2.0}, {"window": 40, "softcap": 5.0}]),
    splits=st.sampled_from([None, 1, 3]),
)
def test_any_shape_and_option(lengths, heads, sizes, page, layout, options, splits, device):
    (H, HKV), (LQ, D) = heads, sizes
    q = drawn(device, len(lengths), LQ, H, D)
    k, v, n, table = caches(device, lengths, page, HKV, D, capacity=90)
    stored = [x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (k, v)]
    got = tw.decode_attention(q, *stored, n, table, layout=layout, num_splits=splits, return_lse=True, **options)
    assert_near(got, by_sequence(q, k, v, n, table, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_within_the_budget(dtype, device):
    q = drawn(device, 2, 2, 8, 64, dtype=dtype)
    k, v, n, table = caches(device, (300, 33), 16, HKV=2, D=64, dtype=dtype)
    reference = lambda q, k, v: module.reference(
        q, k, v, n, table, None, None, None, 0.125, True, 0, 0.0, "NHD", 0
    )[0]  # fmt: skip
    assert_right(tw.decode_attention(q, k, v, n, table), reference, q, k, v)


def test_the_number_of_splits_changes_nothing_but_rounding(device):
    q = drawn(device, 2, 1, 4, 16)
    k, v, n, table = caches(device, (2600, 130), 16)
    whole = tw.decode_attention(q, k, v, n, table, num_splits=1, return_lse=True)
    for splits in (None, 2, 5, 100):  # 41 splits of 64 tokens: more than the combine loads at once
        assert_near(tw.decode_attention(q, k, v, n, table, num_splits=splits, return_lse=True), whole, 2e-6)


def test_with_fixed_splits_a_sequence_does_not_depend_on_the_others(device):
    q = drawn(device, 2, 1, 4, 16)
    k, v, n, table = caches(device, (300, 700), 16)
    both = tw.decode_attention(q, k, v, n, table, num_splits=4)
    other = tw.decode_attention(q, k, v, torch.tensor([300, 5], dtype=torch.int32, device=device), table, num_splits=4)
    assert torch.equal(both[0], other[0])
    assert not torch.equal(both[1], other[1])


def test_repeated_calls_are_bit_identical(device):
    q = drawn(device, 3, 2, 4, 16)
    k, v, n, table = caches(device, (700, 1, 300), 16)
    first = tw.decode_attention(q, k, v, n, table, return_lse=True)
    again = tw.decode_attention(q, k, v, n, table, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_permuting_pages_changes_no_bit(device):
    q = drawn(device, 2, 1, 4, 16)
    k, v, n, table = caches(device, (300, 90), 16)
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(5)).to(device)
    moved = torch.where(table == GARBAGE, table, order[table.clamp_min(0).long()].int())
    permuted = [torch.empty_like(x).index_copy_(0, order, x) for x in (k, v)]
    assert torch.equal(tw.decode_attention(q, *permuted, n, moved), tw.decode_attention(q, k, v, n, table))


@pytest.mark.parametrize("page", [16, 64])  # a tile of tokens spans pages, or is part of one
def test_tokens_and_entries_past_the_length_are_never_read(page, device):
    """Unused entries of the table are far out of bounds: the interpreter would report their use. The rest is NaN."""
    q = drawn(device, 3, 2, 4, 16)
    lengths = (page + 3, 0, 2 * page)
    k, v, n, table = caches(device, lengths, page, capacity=4 * page)
    expected = tw.decode_attention(q, k, v, n, table, return_lse=True)
    kept = torch.zeros(k.shape[:2], dtype=torch.bool, device=device)
    for b, length in enumerate(lengths):
        for token in range(length):
            kept[int(table[b, token // page]), token % page] = True
    for x in (k, v):
        x[~kept] = torch.nan
    got = tw.decode_attention(q, k, v, n, table, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_cache_of_more_elements_than_an_int32_counts(device):
    """Only the pages in use are touched, so the rest takes no memory."""
    D, page = 16, 16
    pages = 2**31 // (page * D) + 2
    k, v = (torch.empty(pages, page, 1, D, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    used = [drawn(device, page, 1, D, seed=seed).to(k.dtype) for seed in (1, 2)]
    k[-1], v[-1] = used
    q, new = drawn(device, 1, 1, 2, D), drawn(device, 1, 1, 1, D, seed=3)
    n, last = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([9], [[pages - 1]]))
    got = tw.decode_attention(q, k, v, n, last, k_new=new, v_new=new)
    small = [x[None] for x in used]
    expected = tw.decode_attention(q, *small, n, torch.zeros_like(last), k_new=new, v_new=new)
    assert torch.equal(got, expected)
    assert torch.equal(k[-1].float(), small[0][0].float())


def test_a_table_may_name_a_page_twice(device):
    q = drawn(device, 2, 1, 4, 16)
    k, v, n, table = caches(device, (40, 40), 16)
    table[1] = table[0]
    out = tw.decode_attention(q, k, v, n, table)
    assert torch.equal(out[1], tw.decode_attention(q[1:].repeat(2, 1, 1, 1), k, v, n, table)[0])


def test_grouped_heads_equal_repeated_heads(device):
    q = drawn(device, 2, 3, 6, 16)
    k, v, n, table = caches(device, (50, 90), 16)
    repeated = [x.repeat_interleave(3, dim=2) for x in (k, v)]
    torch.testing.assert_close(tw.decode_attention(q, k, v, n, table), tw.decode_attention(q, *repeated, n, table))


def test_a_window_equals_a_cache_of_that_many_tokens(device):
    q = drawn(device, 1, 1, 4, 16)
    k, v, n, _ = caches(device, (500,))
    got = tw.decode_attention(q, k, v, n, window=70)
    last = torch.tensor([70], dtype=torch.int32, device=device)
    torch.testing.assert_close(got, tw.decode_attention(q, k[:, 430:], v[:, 430:], last))


def test_a_sink_is_a_key_without_a_value(device):
    q, sinks = drawn(device, 2, 1, 4, 16), drawn(device, 4, seed=9)
    for lengths in ((500, 0), (60, 3)):  # with splits and without
        k, v, n, table = caches(device, lengths, 16)
        got = tw.decode_attention(q, k, v, n, table, sinks=sinks, return_lse=True)
        assert_near(got, by_sequence(q, k, v, n, table, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_caches_with_a_factor_per_head(dtype, device):
    q = drawn(device, 2, 1, 4, 16)
    k, v, n, table = caches(device, (300, 20), 16)
    factors = torch.tensor([0.5, 2.0], device=device), torch.tensor([3.0, 0.25], device=device)
    packed = [(x / f[:, None]).to(dtype) for x, f in zip((k, v), factors, strict=True)]
    got = tw.decode_attention(q, *packed, n, table, k_scale=factors[0], v_scale=factors[1])
    expanded = [x.float() * f[:, None] for x, f in zip(packed, factors, strict=True)]
    torch.testing.assert_close(got, tw.decode_attention(q, *expanded, n, table), rtol=1e-5, atol=1e-5)
    one = tw.decode_attention(q, *packed, n, table, k_scale=0.5, v_scale=2.0)
    torch.testing.assert_close(one, 2 * tw.decode_attention(0.5 * q, *(x.float() for x in packed), n, table))


def test_a_chunk_of_a_prompt_attends_to_the_cache(device):
    """Prefill in chunks: 70 queries of 6 heads, in several tiles of rows."""
    q = drawn(device, 1, 70, 6, 16)
    k, v, n, table = caches(device, (150,), 32, HKV=2)
    assert_near(tw.decode_attention(q, k, v, n, table, return_lse=True), by_sequence(q, k, v, n, table))


def test_a_shared_prompt_is_computed_once_and_merged(device):
    """Cascade: all sequences' queries attend to the prompt as if they were one sequence's, then each to its own."""
    q = drawn(device, 3, 1, 4, 16)
    k, v, n, _ = caches(device, (90, 90, 90))
    k[:, :50], v[:, :50] = k[:1, :50].clone(), v[:1, :50].clone()
    prompt = torch.tensor([50], dtype=torch.int32, device=device)
    shared = tw.decode_attention(q.transpose(0, 1), k[:1, :50], v[:1, :50], prompt, causal=False, return_lse=True)
    own = tw.decode_attention(q, k[:, 50:], v[:, 50:], n - 50, return_lse=True)
    out, lse = tw.merge_attention(shared[0].transpose(0, 1), shared[1].transpose(0, 1), *own)
    assert_near((out, lse), by_sequence(q, k, v, n, None))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_and_rotary_embedding(layout, page, interleaved, device):
    q, new = drawn(device, 2, 3, 4, 16), [drawn(device, 2, 3, 2, 16, seed=s) for s in (7, 8)]
    k, v, n, table = caches(device, (60, 20), page, capacity=64)
    stored = [x.transpose(1, 2).contiguous() if layout == "HND" else x.clone() for x in (k, v)]
    if table is not None:
        table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    angles = drawn(device, 64, 6, seed=3)
    cos, sin = angles.cos(), angles.sin()
    got = tw.decode_attention(
        q, *stored, n, table, k_new=new[0], v_new=new[1], rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=interleaved, layout=layout, return_lse=True,
    )  # fmt: skip
    at = n[:, None].long() + torch.arange(3, device=device)
    q_at, k_at = rotate(q, new[0], cos, sin, at, interleaved)
    written = [x.transpose(1, 2) if layout == "HND" else x for x in stored]
    for rows, x in zip(written, (k_at, new[1]), strict=True):
        for b in range(2):
            torch.testing.assert_close(gathered(rows, table, b, int(n[b]) + 3)[-3:], x[b])
    assert_near(got, by_sequence(q_at, *written, n + 3, table))
    untouched = sum(int((a != b).any(-1).any(-1).sum()) for a, b in zip(written, (k, v), strict=True))
    assert untouched == 2 * 2 * 3  # tokens written


def test_appended_values_beyond_the_range_of_float8_saturate(device):
    q, new = drawn(device, 1, 1, 2, 16), torch.full((1, 1, 2, 16), 1e4, device=device)
    k, v = (torch.zeros(1, 8, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    n = torch.zeros(1, dtype=torch.int32, device=device)
    out = tw.decode_attention(q, k, v, n, k_new=new, v_new=-new, v_scale=2.0)
    assert torch.equal(out, torch.full_like(out, -896.0))


def test_plans_divide_a_batch_evenly(monkeypatch):
    """The slots never run out, and no program has more than a fair share of the tokens and one tile."""
    for B, span, programs, tiles in ((1, 32768, 264, 8), (8, 65536, 264, 8), (64, 4096, 528, 8), (3, 300, 16, 2)):
        splits = _splits.plan_splits(B, tiles, span, 64, programs, 0)
        assert splits.is_split
        for lengths in ([span] * B, [1] * B, [span] + [0] * (B - 1), [span * b // B for b in range(B)]):
            chunk = max(cdiv(cdiv(sum(lengths), splits.programs), 64) * 64, _splits.MIN_CHUNK)
            assert sum(cdiv(n, chunk) for n in lengths) <= splits.slots
    assert not _splits.plan_splits(4096, 8, 4096, 64, 264, 0).is_split


def test_the_grid_depends_on_shapes_alone(device):
    """A CUDA graph is replayed with other lengths: the launches must be the same."""
    if device != "cpu":
        pytest.skip("observed in the interpreter")
    q = drawn(device, 3, 1, 4, 16)
    k, v, n, table = caches(device, (700, 1, 300), 16)
    grids = []
    for lengths in (n, torch.zeros_like(n)):
        clear_plans()
        with tw.interpret() as run:
            tw.decode_attention(q, k, v, lengths, table)
        grids.append([(launch.kernel, launch.grid) for launch in run.launches])
    assert grids[0] == grids[1]
    assert len(grids[0]) == 2


def test_strided_arguments(device):
    q = drawn(device, 2, 4, 3, 16).transpose(1, 2)
    k, v, n, table = caches(device, (60, 20), 16)
    both = torch.stack([k, v], dim=3)  # [pages, page, HKV, 2, D]
    n, table = torch.stack([n, n], 1)[:, 0], table.t().contiguous().t()
    got = tw.decode_attention(q, both[..., 0, :], both[..., 1, :], n, table)
    torch.testing.assert_close(got, tw.decode_attention(q.contiguous(), k, v, n.contiguous(), table.contiguous()))


def test_tensors_on_the_cpu_and_gradients_go_to_torch(device):
    q = drawn(device, 2, 1, 4, 16).requires_grad_()
    k, v, n, table = caches(device, (60, 20), 16)
    out = tw.decode_attention(q, k, v, n, table)
    assert out.requires_grad
    torch.testing.assert_close(out.detach(), tw.decode_attention(q.detach(), k, v, n, table), rtol=1e-5, atol=1e-5)


def test_compiles_to_one_graph_and_is_a_registered_operator(device):
    q = drawn(device, 2, 1, 4, 16)
    k, v, n, table = caches(device, (60, 20), 16, capacity=64)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    new = drawn(device, 2, 1, 2, 16, seed=4)

    def step(q, k, v, n, table, new):
        return tw.decode_attention(q, k, v, n, table, k_new=new, v_new=new, softcap=5.0)

    torch._dynamo.reset()
    stored = k.clone(), v.clone()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *stored, n, table, new)
    torch.testing.assert_close(got, step(q, k, v, n, table, new), rtol=0, atol=0)
    assert torch.equal(stored[0], k)
    options = (0.25, True, 0, 0.0, "NHD", False, 0, 0)
    torch.library.opcheck(module.decode_forward.registered, (q, k, v, n, table, *[None] * 5, *options))
    torch.library.opcheck(module.append_kv.registered, (new, new, k, v, n, table, *[None] * 4, "NHD", False))


def bad_calls():
    q, k = torch.randn(2, 1, 4, 16), torch.randn(8, 16, 2, 16)
    n, table = torch.tensor([3, 60], dtype=torch.int32), torch.arange(8, dtype=torch.int32).view(2, 4)
    three, new, wide = k.repeat(1, 1, 2, 1)[:, :, :3], q[:, :, :2], torch.ones(9, 9)
    yield "lengths beyond the cache", ValueError, "65 tokens, but the cache holds 64", (q, k, k, n + 5, table), {}
    yield "negative length", ValueError, "must not be negative", (q, k, k, n - 4, table), {}
    yield "negative page", ValueError, "names page -1 within a sequence", (q, k, k, n, table - 1), {}
    yield "page beyond the cache", ValueError, "pages 0 to 3", (q, k[:4], k[:4], n, table), {}
    yield "page size", ValueError, "the caches must be", (q, k, k[:, :8], n, table), {}
    yield "head size", ValueError, "the caches must be", (q, k[..., :8], k[..., :8], n, table), {}
    yield "heads", ValueError, "4 query heads are not a multiple of the 3", (q, three, three, n, table), {}
    yield "table", ValueError, "block_table must be", (q, k, k, n, table[:1]), {}
    yield "contiguous", ValueError, "the caches must be", (q, k, k, n), {}
    yield "number of lengths", ValueError, "lengths must be", (q, k, k, n[:1], table), {}
    yield "layout", ValueError, "layout must be", (q, k, k, n, table), {"layout": "DHN"}
    yield "window", ValueError, "a window needs causal", (q, k, k, n, table), {"window": 4, "causal": False}
    yield "splits", ValueError, "num_splits must be a positive integer", (q, k, k, n, table), {"num_splits": 0}
    yield "half a split", ValueError, "num_splits must be a positive", (q, k, k, n, table), {"num_splits": 1.5}
    yield "list of lengths", TypeError, "lengths must be a tensor, not list", (q, k, k, [3, 60], table), {}
    yield "other device", ValueError, "block_table is on meta and q on cpu", (q, k, k, n, table.to("meta")), {}
    few = {"rotary_cos": wide[:, :8], "rotary_sin": wide[:, :8]}
    yield "few angles", ValueError, "60 tokens, but rotary_cos and rotary_sin have 9", (q, k, k, n, table), few
    yield "sinks", ValueError, r"sinks must be \[4\]", (q, k, k, n, table), {"sinks": torch.zeros(3)}
    yield "one new tensor", ValueError, "belong together", (q, k, k, n, table), {"k_new": new}
    yield "no room", ValueError, "but the cache holds 64", (q, k, k, n + 4, table), {"k_new": new, "v_new": new}
    yield "dtype", TypeError, "the dtype of q", (q.half(), k, k, n, table), {}
    yield "float lengths", TypeError, "int32 or int64", (q, k, k, n.float(), table), {}
    yield "scale", ValueError, "k_scale must be", (q, k, k, n, table), {"k_scale": torch.ones(3)}
    yield "angles", ValueError, "at most 8 pairs", (q, k, k, n, table), {"rotary_cos": wide, "rotary_sin": wide}


@pytest.mark.parametrize("name", [name for name, *_ in bad_calls()])
def test_bad_arguments_raise_one_sentence(name):
    error, message, args, options = next(rest for known, *rest in bad_calls() if known == name)
    with pytest.raises(error, match=message) as caught:
        tw.decode_attention(*args, **options)
    assert "\n" not in str(caught.value)


def test_in_debug_mode_the_kernel_reports_values_that_only_the_gpu_knows(device, monkeypatch):
    if device != "cpu":
        pytest.skip("a failed assertion would end this process")
    monkeypatch.setattr(knobs.runtime, "debug", True)  # TRITON_DEBUG=1
    q = drawn(device, 1, 1, 2, 16)
    k, v, n, table = caches(device, (40,), 16, HKV=2)
    rest = (None, None, None, None, None, module.Decode(0.25, True, 0, 0.0, "NHD", False, 0, 0))
    module.decode_forward(q, k, v, n, table, *rest)
    with pytest.raises(Exception, match="longer than its cache"):
        module.decode_forward(q, k, v, n + 20, table, *rest)
    with pytest.raises(Exception, match="names a page outside"):
        module.decode_forward(q, k, v, n, table - 1 - table.max(), *rest)
