"""Attention under the signatures of other libraries equals plain attention on each sequence."""

import math

import pytest
import torch

from tilewright.ops.decode._reference import attend
from tilewright.ops.decode.mla_decode import WIDTH, pack
from tilewright.serving import (
    BatchDecodeWithPagedKVCacheWrapper,
    block_table_from_csr,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
    get_mla_metadata,
)


def drawn(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def exact(q, k, v, lengths, **options):
    found = attend(*(x.double() for x in (q, k, v)), lengths, q.shape[3] ** -0.5, **options)
    return [x.to(q.dtype) for x in found]


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {"causal": False}),
        ({"causal": True}, {}),
        ({"causal": True, "window_size": (6, -1)}, {"window": 7}),
        ({"window_size": (6, 0), "softcap": 3.0}, {"window": 7, "softcap": 3.0}),
        ({"window_size": (-1, 0), "num_splits": 2}, {}),
    ],
)
def test_flash_attention(options, ours, device):
    q, k, v = drawn(device, 2, 3, 4, 16), drawn(device, 2, 40, 2, 16, seed=1), drawn(device, 2, 40, 2, 16, seed=2)
    lengths = torch.tensor([40, 13], dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options)
    wanted = exact(q, k, v, lengths, **ours)
    torch.testing.assert_close(out, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, wanted[1].transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_flash_attention_appends_and_takes_a_number_as_length(device):
    q, k, v = drawn(device, 2, 1, 4, 16), drawn(device, 2, 40, 2, 16, seed=1), drawn(device, 2, 40, 2, 16, seed=2)
    new = drawn(device, 2, 1, 2, 16, seed=3)
    out = flash_attn_with_kvcache(q, k, v, new, 2 * new, cache_seqlens=12)
    assert torch.equal(k[:, 12:13], new)
    lengths = torch.full((2,), 13, dtype=torch.int32, device=device)
    torch.testing.assert_close(out, exact(q, k, v, lengths)[0], rtol=1e-4, atol=1e-5)
    whole = flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(whole, exact(q, k, v, lengths + 27)[0], rtol=1e-4, atol=1e-5)


def test_flash_attention_refuses_what_it_does_not_support(device):
    q, k = drawn(device, 2, 3, 4, 16), drawn(device, 2, 40, 4, 16)
    for options in ({"alibi_slopes": q}, {"cache_batch_idx": q}, {"cache_leftpad": q}, {"window_size": (3, 2)}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            flash_attn_with_kvcache(q, k, k, **options)
    with pytest.raises(NotImplementedError, match="looks ahead"):
        flash_attn_with_kvcache(q, k, k, window_size=(3, -1))


@pytest.mark.parametrize("quantized", [False, True])
def test_flash_mla(quantized, device):
    q, cache = drawn(device, 2, 1, 3, WIDTH), drawn(device, 3, 16, 1, WIDTH, seed=1)
    table = torch.tensor([[2, 0], [1, -5]], dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)
    stored = pack(cache) if quantized else cache
    out, lse = flash_mla_with_kvcache(
        q, stored, table, lengths, 512, *get_mla_metadata(lengths, 3, 1), is_fp8_kvcache=quantized
    )
    k = cache[torch.tensor([[2, 0], [1, 1]], device=device)].flatten(1, 2)
    wanted = exact(q, k, k[..., :512], lengths)
    tolerance = 0.05 if quantized else 1e-4
    torch.testing.assert_close(out, wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, wanted[1].transpose(1, 2), rtol=tolerance, atol=tolerance)
    for options, message in (({"is_fp8_kvcache": not quantized}, "does not fit"), ({"head_dim_v": 256}, "must be 512")):
        with pytest.raises(ValueError, match=message):
            flash_mla_with_kvcache(q, stored, table, lengths, **{"head_dim_v": 512, **options})
    with pytest.raises(NotImplementedError, match="indices"):
        flash_mla_with_kvcache(q, stored, table, lengths, 512, indices=table)


def test_block_table_from_csr(device):
    indptr = torch.tensor([0, 3, 3, 4], dtype=torch.int32, device=device)
    indices = torch.tensor([7, 2, 5, 0], dtype=torch.int32, device=device)
    last = torch.tensor([1, 0, 16], dtype=torch.int32, device=device)
    table, lengths = block_table_from_csr(indptr, indices, last, page=16, max_pages=3)
    assert table.tolist() == [[7, 2, 5], [-1, -1, -1], [0, -1, -1]]
    assert lengths.tolist() == [33, 0, 16]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfer_decoding(layout, device):
    q, cache = drawn(device, 2, 4, 16), drawn(device, 5, 2, 8, 2, 16, seed=1)  # [pages, 2, page, HKV, D]
    stored = cache.transpose(2, 3).contiguous() if layout == "HND" else cache
    indptr = torch.tensor([0, 3, 4], dtype=torch.int32)
    indices = torch.tensor([4, 1, 0, 3], dtype=torch.int32, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), layout)
    with pytest.raises(RuntimeError, match="call plan"):
        wrapper.run(q, stored)
    wrapper.plan(indptr, indices, torch.tensor([3, 8], dtype=torch.int32), 4, 2, 16, 8, q_data_type=q.dtype)
    for kv in (stored, stored.unbind(1)):
        out, lse = wrapper.run(q, kv, return_lse=True)
        for b, (pages, length) in enumerate((([4, 1, 0], 19), ([3], 8))):
            k, v = (cache[pages, n].flatten(0, 1)[None] for n in (0, 1))
            wanted = exact(q[b : b + 1, None], k, v, torch.tensor([length], device=device))
            torch.testing.assert_close(out[b], wanted[0][0, 0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[b] * math.log(2), wanted[1][0, 0], rtol=1e-4, atol=1e-5)
    short = stored[:, :, :4] if layout == "NHD" else stored[:, :, :, :4]
    for wrong in ((q[:, :2], stored), (q, short)):
        with pytest.raises(ValueError, match="plan was given query heads, key heads, head size and page size"):
            wrapper.run(*wrong)
    with pytest.raises(NotImplementedError, match="ROPE_LLAMA"):
        wrapper.plan(indptr, indices, indptr, 4, 2, 16, 8, pos_encoding_mode="ROPE_LLAMA")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": [3, 1, 0]}, "indptr must ascend from 0"),
        ({"indptr": [0, 1, 9]}, "at most the 3 indices"),
        ({"last_page_len": [5, 17]}, r"last_page_len must be 0 to 16"),
        ({"last_page_len": [5]}, r"indptr must be \[B \+ 1\]"),
    ],
)
def test_flashinfer_paging_that_does_not_fit_is_refused(change, message):
    paging = {"indptr": [0, 1, 3], "indices": [4, 5, 6], "last_page_len": [5, 16]} | change
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in paging.items()}
    with pytest.raises(ValueError, match=message):
        BatchDecodeWithPagedKVCacheWrapper().plan(**tensors, num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=16)
    with pytest.raises(ValueError, match="kv_layout must be"):
        BatchDecodeWithPagedKVCacheWrapper(kv_layout="NH")
