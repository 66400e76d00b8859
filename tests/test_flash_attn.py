"""The functions with the arguments of the package flash_attn."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

from support import laid_out
from tilewright.flash_attn import flash_attn_func, flash_attn_varlen_func


def drawn(device, *shapes):
    return [laid_out(shape, "contiguous", device=device, seed=n) for n, shape in enumerate(shapes)]


def expected(q, k, v, causal=False, left=None, scale=None):
    """Return what flash_attn documents: the diagonal is at the bottom right, and windows reach from it."""
    (LQ, LK), device = (q.shape[1], k.shape[1]), q.device
    distance = torch.arange(LQ, device=device)[:, None] + LK - LQ - torch.arange(LK, device=device)
    seen = torch.ones(LQ, LK, dtype=torch.bool, device=device)
    seen = seen & (distance >= 0) if causal else seen
    seen = seen if left is None else seen & (distance <= left)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, seen, scale=scale, enable_gqa=True).transpose(1, 2)


def test_dense(device):
    q, k, v = drawn(device, (2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))
    torch.testing.assert_close(flash_attn_func(q, k, v), expected(q, k, v))
    out, lse, probabilities = flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, window_size=(4, -1), return_attn_probs=True
    )
    torch.testing.assert_close(out, expected(q, k, v, True, 4, 0.3))
    assert out.is_contiguous(), "the layout of the query"
    assert (lse.shape, probabilities) == ((2, 4, 9), None)
    slopes = torch.full((4,), 0.5, device=device)
    assert not torch.allclose(flash_attn_func(q, k, v, alibi_slopes=slopes, softcap=1.0), expected(q, k, v))
    assert not torch.allclose(flash_attn_func(q, k, v, dropout_p=0.5), expected(q, k, v))


def test_documents(device):
    q, k, v = (x.requires_grad_() for x in drawn(device, (20, 4, 16), (25, 2, 16), (25, 2, 16)))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 20], [0, 8, 25]))
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 15, 17, causal=True, return_attn_probs=True)
    parts = [(slice(0, 5), slice(0, 8)), (slice(5, 20), slice(8, 25))]
    alone = [expected(q[None, i], k[None, j], v[None, j], causal=True)[0] for i, j in parts]
    torch.testing.assert_close(out, torch.cat(alone))
    assert lse.shape == (4, 20)
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, torch.cat(alone)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="no block_table"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 15, 17, block_table=cu_q)


def test_errors_name_the_shapes_that_were_passed(device):
    q, k = drawn(device, (2, 9, 4, 16), (2, 12, 3, 16))
    with pytest.raises(ValueError, match=r"of shape \[batch, length, heads, head size\], not q \[9, 4"):
        flash_attn_func(q[0], k[0], k[0])
    with pytest.raises(ValueError, match=r"\[2, 12, 3, 16\] and v \[2, 11, 3, 16\] do not fit"):
        flash_attn_func(q, k, k[:, 1:])
    with pytest.raises(ValueError, match="the 4 heads of q must be a multiple of the 3 of k and v"):
        flash_attn_func(q, k, k)
    cu = torch.tensor([0, 9], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"takes q, k and v of shape \[total length, heads, head size\]"):
        flash_attn_varlen_func(q, k, k, cu, cu, 9, 9)
    with pytest.raises(ValueError, match="needs cu_seqlens_q and cu_seqlens_k"):
        flash_attn_varlen_func(q[0], q[0], q[0], cu, None, 9, 9)
