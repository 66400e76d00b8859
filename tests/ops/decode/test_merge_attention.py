"""Merging attention over two sets of tokens."""

import pytest
import torch

import tilewright as tw
from support import assert_compiles, assert_right, laid_out
from tilewright.ops.decode import merge_attention as module


def drawn(device, *shape, dtype=torch.float32):
    out = [laid_out((*shape, 24), "contiguous", device=device, dtype=dtype, seed=seed) for seed in (0, 1)]
    lse = [3 * laid_out(shape, "contiguous", device=device, seed=seed) for seed in (2, 3)]
    return out[0], lse[0], out[1], lse[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_softmax_over_both_sets(dtype, device):
    args = drawn(device, 3, 5, dtype=dtype)
    out, lse = tw.merge_attention(*args)
    assert_right(out, lambda *args: module.reference(*args)[0], *args)
    assert_right(lse, lambda *args: module.reference(*args)[1], *args)


def test_order_and_grouping_do_not_matter(device):
    out_a, lse_a, out_b, lse_b = drawn(device, 4)
    a, b, c = (out_a, lse_a), (out_b, lse_b), (out_a + out_b, lse_a - lse_b)
    left = tw.merge_attention(*tw.merge_attention(*a, *b), *c)
    right = tw.merge_attention(*a, *tw.merge_attention(*c, *b))
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_an_empty_set_changes_nothing_and_two_give_zeros(device):
    out_a, lse_a, out_b, lse_b = drawn(device, 6)
    out_b, lse_b = torch.zeros_like(out_b), torch.full_like(lse_b, -torch.inf)
    lse_a[0] = -torch.inf
    out, lse = tw.merge_attention(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out[1:], out_a[1:])
    torch.testing.assert_close(lse, lse_a)
    assert not out[0].any()


def test_large_sums_do_not_overflow(device):
    out_a, lse_a, out_b, lse_b = drawn(device, 6)
    out, lse = tw.merge_attention(out_a, lse_a + 500, out_b, lse_b + 500)
    torch.testing.assert_close(out, tw.merge_attention(out_a, lse_a, out_b, lse_b)[0], rtol=1e-3, atol=1e-4)
    assert lse.isfinite().all()


def test_registration_strides_and_gradients(device):
    args = drawn(device, 3, 2)
    torch.library.opcheck(module.merge_forward.registered, args)
    assert_compiles(tw.merge_attention, *args)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args]
    torch.testing.assert_close(tw.merge_attention(*strided), tw.merge_attention(*args))
    assert tw.merge_attention(args[0].requires_grad_(), *args[1:])[0].requires_grad


def test_bad_arguments_raise_one_sentence(device):
    out_a, lse_a, out_b, lse_b = drawn(device, 3)
    with pytest.raises(ValueError, match=r"lse_a must be \[3\], not \[2\]"):
        tw.merge_attention(out_a, lse_a[:2], out_b, lse_b)
    with pytest.raises(ValueError, match="the outputs must have one shape"):
        tw.merge_attention(out_a, lse_a, out_b[..., :3], lse_b)
    with pytest.raises(TypeError, match="two dtypes"):
        tw.merge_attention(out_a, lse_a, out_b.half(), lse_b)
    with pytest.raises(TypeError, match="lse_b must be float32"):
        tw.merge_attention(out_a, lse_a, out_b, lse_b.half())
