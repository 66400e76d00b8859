"""Multi-head latent attention: equal to plain attention on the expanded heads, with pages and quantized caches."""

import pytest
import torch
from triton import knobs

import tilewright as tw
from support import assert_right
from tilewright.ops.decode import mla_decode as module
from tilewright.ops.decode._reference import attend

GARBAGE = -(2**31)


def drawn(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def cached(device, lengths, page=16, dtype=torch.float32):
    """Return a paged cache in random order, lengths, and a block table whose unused entries are garbage."""
    B, each = len(lengths), -(-max(1, *lengths) // page)
    order = torch.randperm(B * each, generator=torch.Generator().manual_seed(2)).view(B, each).int()
    known = torch.tensor(lengths, dtype=torch.int32)
    order[torch.arange(each) * page >= known[:, None]] = GARBAGE
    return drawn(device, B * each, page, module.WIDTH, dtype=dtype, seed=1), known.to(device), order.to(device)


def test_equals_plain_attention_on_the_expanded_heads(device):
    """Keys W_k c and values W_v c of every head; the absorbed form has W_k in the query and W_v after the output."""
    H, wide = 3, 8
    q_nope, q_rope = drawn(device, 1, 2, H, wide), drawn(device, 1, 2, H, module.ROPE, seed=3)
    w_k, w_v = (drawn(device, H, wide, module.LATENT, seed=seed) / module.LATENT**0.5 for seed in (4, 5))
    cache, n = drawn(device, 1, 30, module.WIDTH, seed=6), torch.tensor([30], dtype=torch.int32, device=device)
    latent, rope = cache[..., : module.LATENT], cache[..., module.LATENT :]

    k = torch.cat([torch.einsum("btl,hdl->bthd", latent, w_k), rope[:, :, None].expand(-1, -1, H, -1)], -1)
    v = torch.einsum("btl,hdl->bthd", latent, w_v)
    scale = (wide + module.ROPE) ** -0.5
    expected, _ = attend(torch.cat([q_nope, q_rope], -1).double(), k.double(), v.double(), n, scale)

    absorbed = torch.cat([torch.einsum("bqhd,hdl->bqhl", q_nope, w_k), q_rope], -1)
    out = torch.einsum("bqhl,hdl->bqhd", tw.mla_decode(absorbed, cache, n, scale=scale), w_v)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(0, 1, 40), (300, 5, 17)])  # without splits, and with
@pytest.mark.parametrize("quantized", [False, True])
def test_ragged_lengths_and_pages(lengths, quantized, device):
    q = drawn(device, 3, 2, 2, module.WIDTH)
    cache, n, table = cached(device, lengths)
    stored = module.pack(cache) if quantized else cache
    values = module.unpack(stored, torch.float64)
    out, lse = tw.mla_decode(q, stored, n, table, return_lse=True)
    for b, length in enumerate(lengths):
        pages = [values[int(table[b, i])] for i in range(-(-length // 16))]
        tokens = torch.cat([*pages, values[:0].flatten(0, 1)])[:length][None, :, None]  # [1, length, 1, 576]
        exact = attend(q[b : b + 1].double(), tokens, tokens[..., :512], n[b : b + 1], 576**-0.5)
        torch.testing.assert_close(out[b].double(), exact[0][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse[b].double(), exact[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantized", [False, True])
def test_half_precision_within_the_budget(quantized, device):
    q = drawn(device, 2, 1, 16, module.WIDTH, dtype=torch.bfloat16)
    cache, n, table = cached(device, (60, 33), dtype=torch.bfloat16)
    stored = module.pack(cache) if quantized else cache
    out = tw.mla_decode(q, stored, n, table)
    assert_right(out, lambda q, cache: module.reference(q, cache, n, table, 576**-0.5, True, 0)[0], q, stored)


def test_splits_change_only_rounding_and_repeats_change_nothing(device):
    q = drawn(device, 2, 1, 2, module.WIDTH)
    cache, n, table = cached(device, (200, 60))
    whole = tw.mla_decode(q, cache, n, table, num_splits=1, return_lse=True)
    for splits in (3, 100):
        parts = tw.mla_decode(q, cache, n, table, num_splits=splits, return_lse=True)
        again = tw.mla_decode(q, cache, n, table, num_splits=splits, return_lse=True)
        for a, b, c in zip(whole, parts, again, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
            assert torch.equal(b, c)


def test_a_quantized_token_has_656_bytes_and_the_error_of_float8(device):
    cache = drawn(device, 5, 7, module.WIDTH) * torch.logspace(-6, 3, 5, device=device)[:, None, None]
    packed = module.pack(cache)
    assert (packed.dtype, packed.shape) == (torch.uint8, (5, 7, 656))
    error = (module.unpack(packed, torch.float32) - cache).abs()
    groups = cache[..., :512].unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True)
    assert (error[..., :512].unflatten(-1, (4, 128)) <= groups / 28 + 1e-30).all()  # 448 / 16
    assert (error[..., 512:] <= cache[..., 512:].abs() / 256).all()
    assert not module.unpack(module.pack(torch.zeros_like(cache)), torch.float32).any()


@pytest.mark.parametrize("quantized", [False, True])
def test_tokens_and_entries_past_the_length_are_never_read(quantized, device):
    q = drawn(device, 2, 1, 2, module.WIDTH)
    cache, n, table = cached(device, (19, 0))
    stored = module.pack(cache) if quantized else cache
    expected = tw.mla_decode(q, stored, n, table)
    unused = torch.ones(stored.shape[:2], dtype=torch.bool, device=device)
    unused[int(table[0, 0])] = False
    unused[int(table[0, 1]), :3] = False
    stored[unused] = 255 if quantized else torch.nan  # NaN in every format
    assert torch.equal(tw.mla_decode(q, stored, n, table), expected)


def test_cache_of_any_alignment(device):
    q = drawn(device, 1, 1, 2, module.WIDTH)
    packed = module.pack(drawn(device, 1, 9, module.WIDTH, seed=1))
    n = torch.tensor([9], dtype=torch.int32, device=device)
    shifted = torch.zeros(1 + packed.numel(), dtype=torch.uint8, device=device)[1:].view(packed.shape).copy_(packed)
    expected = tw.mla_decode(q, packed, n)
    assert torch.equal(tw.mla_decode(q, shifted, n), expected)
    assert torch.equal(tw.mla_decode(q, packed.unsqueeze(2).view(torch.float8_e4m3fn), n), expected)
    torch.testing.assert_close(
        tw.mla_decode(q.half(), packed, n).float(), expected, rtol=1e-2, atol=1e-2
    )  # float16 goes to torch


def test_compiles_to_one_graph_and_is_a_registered_operator(device):
    q = drawn(device, 1, 2, 2, module.WIDTH)
    cache, n = drawn(device, 1, 9, module.WIDTH, seed=1), torch.tensor([9], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(tw.mla_decode, fullgraph=True, backend="aot_eager")
    for stored in (cache, module.pack(cache)):
        torch.testing.assert_close(compiled(q, stored, n, table), tw.mla_decode(q, stored, n, table), rtol=0, atol=0)
        torch.library.opcheck(module.mla_forward.registered, (q, stored, n, table, 0.1, True, 0))
    assert tw.mla_decode(q.requires_grad_(), cache, n, table).requires_grad


def test_bad_arguments_raise_one_sentence(device):
    q = drawn(device, 2, 1, 2, module.WIDTH)
    cache, n, table = cached(device, (20, 10))
    table = torch.zeros_like(table)
    for error, message, args in (
        (ValueError, r"q must be \[B, LQ, H, 576\]", (q[..., :512], cache, n, table)),
        (ValueError, r"the cache must be \[pages, tokens, 576\], not", (q, cache[..., :512], n, table)),
        (ValueError, "656", (q, module.pack(cache)[..., :600], n, table)),
        (ValueError, "must hold 2 sequences", (q, cache, n)),
        (ValueError, "21 tokens, but the cache holds 16", (q, cache, n + 1, table[:, :1])),
        (TypeError, "dtype of q", (q, cache.half(), n, table)),
        (TypeError, "int32 or int64", (q, cache, n.float(), table)),
        (TypeError, "kv_cache must be a tensor, not list", (q, [cache], n, table)),
    ):
        with pytest.raises(error, match=message):
            tw.mla_decode(*args)


def test_in_debug_mode_the_kernel_reports_pages_outside_of_the_cache(device, monkeypatch):
    if device != "cpu":
        pytest.skip("a failed assertion would end this process")
    monkeypatch.setattr(knobs.runtime, "debug", True)  # TRITON_DEBUG=1
    q = drawn(device, 1, 1, 2, module.WIDTH)
    cache, n, table = cached(device, (20,))
    with pytest.raises(Exception, match="names a page outside"):
        module.mla_forward(q, cache, n, table - 1 - table.max(), module.MLA(0.1, True, 0))
