"""Laws of rotary embedding."""

from typing import Any

import pytest
import torch

import tilewright as tw
from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, laid_out
from tilewright.ops import rope as module

nan = float("nan")
both = pytest.mark.parametrize("interleaved", [False, True])


def tables(T, R, device, dtype=torch.float32):
    angles = torch.arange(T, device=device)[:, None] * 10000.0 ** (-torch.arange(R, device=device) / R)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def first(interleaved, fn=tw.rope, **options):
    """Return a function of q alone, with one result."""
    return lambda q, k, cos, sin, positions=None: fn(q, k, cos, sin, positions, interleaved=interleaved, **options)[0]


def reference(q, k, cos, sin, positions=None, *, interleaved):
    return module.reference(q, k, cos, sin, positions, interleaved)


@both
def test_norms_are_preserved_and_position_zero_is_not_rotated(interleaved, device):
    q, (cos, sin) = torch.randn(2, 9, 3, 16, device=device), tables(9, 8, device)
    turned, nothing = tw.rope(q, None, cos, sin, interleaved=interleaved)
    assert nothing is None
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(turned[:, 0], q[:, 0])


@both
def test_dot_products_depend_on_relative_positions(interleaved, device):
    """The purpose of the embedding."""
    q, k = torch.randn(2, 1, 1, 1, 16, device=device)
    cos, sin = tables(50, 8, device)
    many = [x.expand(1, 50, 1, 16) for x in (q, k)]
    turned = [t[0, :, 0] for t in tw.rope(many[0], many[1], cos, sin, interleaved=interleaved)]
    products = turned[0] @ turned[1].T
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-4)


@both
def test_the_inverse_rotation_restores_the_input(interleaved, device):
    q, k = torch.randn(2, 5, 4, 24, device=device), torch.randn(2, 5, 2, 24, device=device)
    cos, sin = tables(5, 8, device)
    turned = tw.rope(q, k, cos, sin, interleaved=interleaved)
    back = module.rope_forward(*turned, cos, sin, None, module.Rope(interleaved, True))
    torch.testing.assert_close(back, (q, k))
    assert torch.equal(turned[0][..., 16:], q[..., 16:])


def test_interleaved_equals_half_split_after_a_permutation(device):
    q, (cos, sin) = torch.randn(1, 6, 2, 16, device=device), tables(6, 8, device)
    places = torch.arange(16, device=device).view(2, 8).T.flatten()  # the pairs (i, i + 8), side by side
    halves = tw.rope(q, None, cos, sin)[0]
    pairs = tw.rope(q[..., places], None, cos, sin, interleaved=True)[0]
    assert torch.equal(pairs, halves[..., places])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tables_of_higher_precision_than_heads(dtype, device):
    q = torch.randn(1, 7, 2, 16, device=device, dtype=dtype)
    k = torch.randn(1, 7, 1, 16, device=device, dtype=dtype)
    for table in (torch.float32, dtype):
        cos, sin = tables(7, 8, device, table)
        got = tw.rope(q, k, cos, sin)
        assert [t.dtype for t in got if t is not None] == [dtype, dtype]
        assert_right(got[0], first(False, reference), q, k, cos, sin)


@both
def test_positions(interleaved, device):
    q, (cos, sin) = torch.randn(2, 5, 3, 10, device=device), tables(40, 4, device)
    for positions in (torch.tensor([3, 0, 39, 7, 7]), torch.randint(40, (2, 5)), torch.randint(40, (5, 2)).T):
        places = positions.to(device, torch.int32)
        got = first(interleaved)(q, q, cos, sin, places)
        assert_right(got, first(interleaved, reference), q, q, cos, sin, places)
    beyond = torch.tensor([0, 40, -1, 39, 2], device=device)
    got = module.rope_forward(q, q, cos, sin, beyond, module.Rope(interleaved))[0]
    assert got[..., :8].isnan().all(-1)[0, :, 0].tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("seq_dim", "interleaved"), [(1, True), (2, False)])
def test_any_layout_and_gradients(seq_dim, layout, interleaved, device):
    """A result has the strides of its input, and nothing is copied."""
    shape = (2, 5, 3, 12) if seq_dim == 1 else (2, 3, 5, 12)
    q, (cos, sin) = laid_out(shape, layout, device=device), tables(5, 4, device)

    def wanted(q, k, cos, sin):
        q, k = (x.transpose(1, 2) if seq_dim == 2 else x for x in (q, k))
        turned = module.reference(q, k, cos, sin, None, interleaved)[0]
        return turned.transpose(1, 2) if seq_dim == 2 else turned

    ours = first(interleaved, seq_dim=seq_dim)
    assert_right(ours(q, q, cos, sin), wanted, q, q, cos, sin)
    assert_gradients_match(lambda x: ours(x, x, cos, sin), lambda x: wanted(x, x, cos.to(x), sin.to(x)), q)
    if layout == "contiguous":
        turned = ours(q.transpose(0, 1).contiguous().transpose(0, 1), q, cos, sin)
        assert turned.transpose(0, 1).is_contiguous()


@both
def test_in_place(interleaved, device):
    cos, sin = tables(5, 4, device)
    packed = torch.randn(2, 5, 7, 12, device=device)  # queries and keys as one projection computes them
    q, k, rest = packed.split([4, 2, 1], 2)
    wanted, kept = module.reference(q, k, cos, sin, None, interleaved), rest.clone()
    version = q._version
    got = tw.rope(q, k, cos, sin, interleaved=interleaved, inplace=True)
    assert got[0] is q
    assert got[1] is k
    assert q._version > version
    torch.testing.assert_close((q, k), wanted)
    assert torch.equal(rest, kept)


def test_in_place_with_gradients(device):
    x, (cos, sin) = torch.randn(1, 5, 2, 8, device=device, requires_grad=True), tables(5, 4, device)
    (ours,) = torch.autograd.grad(tw.rope(x * 1, None, cos, sin, inplace=True)[0].square().sum(), x)
    torch.testing.assert_close(ours, 2 * x.detach())  # rotations preserve norms
    with pytest.raises(RuntimeError, match="leaf Variable"):
        tw.rope(x, None, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="single memory location"):
        tw.rope(x.detach().expand(3, 5, 2, 8), None, cos, sin, inplace=True)


def test_double_backward(device):
    q, (cos, sin) = torch.randn(1, 3, 2, 6, device=device, requires_grad=True), tables(3, 3, device)
    found = []
    for fn in (first(False), first(False, reference)):
        (dq,) = torch.autograd.grad(fn(q, q, cos, sin).pow(3).sum(), q, create_graph=True)
        found.append(torch.autograd.grad(dq.square().sum(), q))
    torch.testing.assert_close(*found)


def test_tables_have_no_gradient(device):
    q, (cos, sin) = torch.randn(1, 3, 2, 6, device=device, requires_grad=True), tables(3, 3, device)
    cos.requires_grad_()
    tw.rope(q, None, cos, sin)[0].sum().backward()
    assert cos.grad is None


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4)])
def test_empty(shape, device):
    q, (cos, sin) = torch.randn(shape, device=device), tables(3, 2, device)
    assert [t.shape for t in tw.rope(q, q, cos, sin) if t is not None] == [shape, shape]


def test_ineligible_inputs_go_to_torch(device):
    q, (cos, sin) = torch.randn(2, 3, 2, 4, device=device), tables(3, 2, device)
    wide = first(False)(q.double(), q.double(), cos.double(), sin.double())
    torch.testing.assert_close(wide, first(False, reference)(q, q, cos, sin).double(), rtol=1e-5, atol=1e-5)
    batch = torch.func.vmap(lambda q: tw.rope(q, None, cos, sin)[0])(q[:, None])
    torch.testing.assert_close(batch[:, 0], tw.rope(q, None, cos, sin)[0])


def test_errors(device):
    q, (cos, sin) = torch.randn(2, 3, 2, 4, device=device), tables(3, 2, device)
    whole = torch.arange(3, device=device)
    wrong: Any = (
        ((q, None, cos, sin), {"seq_dim": 0}, "seq_dim must be 1"),
        ((q[0], None, cos, sin), {}, "must have four dimensions"),
        ((q, q[:1], cos, sin), {}, "number of heads only"),
        ((q, None, cos[:, :1], sin), {}, r"must be \[positions, at most 2 pairs\]"),
        ((q[..., :3], None, cos, sin), {}, "at most 1 pairs"),
        ((q, None, cos[:2], sin[:2]), {}, "have 2 positions, fewer than the 3 tokens"),
        ((q, None, cos, sin, whole[:2]), {}, r"must be integers, \[3\] or \[2, 3\]"),
        ((q, None, cos, sin, whole.float()), {}, "not torch.float32"),
    )
    for args, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            tw.rope(*args, **options)
    with pytest.raises(TypeError, match="cos must be a tensor, not NoneType"):
        tw.rope(q, None, None, sin)  # type: ignore[arg-type]


def test_registered_operator(device):
    q, (cos, sin) = torch.randn(2, 5, 3, 12, device=device), tables(5, 4, device)
    places = torch.randint(5, (2, 5), device=device)
    leaves = [q.clone().requires_grad_(), q[:, :, :0].clone().requires_grad_()]
    torch.library.opcheck(module.rope_forward.registered, (*leaves, cos, sin, None, False, False))
    strided = (q[..., ::2], q.transpose(2, 3)[..., ::2].transpose(2, 3)[..., :6])
    torch.library.opcheck(module.rope_forward.registered, (*strided, cos[:, :3], sin[:, :3], places, True, True))
    assert_compiles(lambda q: module.rope_forward(q, q, cos, sin, None, module.Rope(False)), q)


def test_compiled_code_calls_torch(device):
    q, (cos, sin) = torch.randn(2, 5, 3, 12, device=device), tables(5, 4, device)
    compiled = torch.compile(tw.rope, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, q, cos, sin), module.reference(q, q, cos, sin, None, False))


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    S = 2**17 + 1
    q, (cos, sin) = torch.zeros(1, S, 128, 128, device=device, dtype=torch.float16), tables(S, 64, device)
    q[:, -1] = 1
    got = tw.rope(q, None, cos, sin)[0][:, -1:]
    last = torch.tensor([S - 1], device=device)
    torch.testing.assert_close(got, module.reference(q[:, -1:], q[:, -1:], cos, sin, last, False)[0])
