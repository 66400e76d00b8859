"""The verifier for functions of one's own."""

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright import registry
from tilewright.errors import UnknownOp
from tilewright.spec import Case, Cost, Op
from tilewright.testing import assert_kernel


def test_check_returns_the_verdict_on_a_function():
    right = tw.check(lambda x: torch.softmax(x, -1), "softmax", depth="quick", dtypes=["float32"])
    assert (right.verdict, right.op, right.labels) == ("right", "softmax", ["falls back to torch"])
    wrong = tw.check(torch.zeros_like, "softmax", depth="quick", dtypes=["float32"])
    assert wrong.verdict == "wrong"
    with pytest.raises(ValueError, match="depth"):
        tw.check(torch.zeros_like, "softmax", depth="deep")
    with pytest.raises(TypeError, match=r'check\(my_softmax, "softmax"\)'):
        tw.check("softmax", torch.softmax)
    with pytest.raises(UnknownOp, match="softmax"):
        tw.check(torch.zeros_like, "sofmax")


def scaled(x, weight, eps):
    return x * weight + eps


def test_a_function_that_computes_what_the_reference_computes_passes():
    examples = (torch.randn(5, 40), torch.randn(40), 0.5)
    assert_kernel(lambda x, w, eps: torch.addcmul(torch.full((), eps), x, w), reference=scaled, inputs=examples)
    assert_kernel(scaled, reference=scaled, inputs=lambda: (torch.rand(5, 40), torch.rand(40), 0.5))


def test_several_outputs_and_outputs_without_gradient():
    both = lambda x: (x.sin(), x.argmax(-1))
    assert_kernel(both, reference=both, inputs=(torch.randn(6, 70),))
    with pytest.raises(AssertionError, match="output 1"):
        assert_kernel(lambda x: (x.sin(), x.argmin(-1)), reference=both, inputs=(torch.randn(6, 70),))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x.bfloat16().softmax(-1).float(), "elements are off"),
        (lambda x: x.detach().softmax(-1) + 0 * x, "gradient of x"),
        (lambda x: torch.softmax(x.contiguous().data_ptr() * 0 + x.as_strided(x.shape, (70, 1)), -1), "off|bounds"),
        (lambda x: x.softmax(-1) * 0, "elements are off"),
    ],
)
def test_a_wrong_function_fails_with_the_reason(fn, message):
    with pytest.raises(AssertionError, match=message):
        assert_kernel(fn, reference=lambda x: x.softmax(-1), inputs=(torch.randn(50, 70),))


def test_the_failure_shows_where_it_is_wrong():
    upper = lambda x: torch.cat([x[:32].softmax(-1), x[32:]])
    with pytest.raises(AssertionError) as failure:
        assert_kernel(upper, reference=lambda x: x.softmax(-1), inputs=(torch.randn(64, 70),))
    picture = str(failure.value).splitlines()[1:]
    assert picture == ["·" * 64] * 8 + ["█" * 64] * 8


def test_inputs_must_hold_a_tensor():
    with pytest.raises(TypeError, match="tuple with a tensor"):
        assert_kernel(scaled, reference=scaled, inputs=(1, 2))


def test_inputs_that_never_change_are_refused():
    labels, x = torch.randint(0, 9, (40,)), torch.randn(5, 40)
    known = labels.cumsum(0)
    with pytest.raises(ValueError, match="no floating-point tensor to be redrawn: pass a function"):
        assert_kernel(lambda n: known.clone(), reference=lambda n: n.cumsum(0), inputs=(labels,))
    with pytest.raises(ValueError, match="inputs returns the same values each time"):
        assert_kernel(lambda x: x.sin(), reference=torch.sin, inputs=lambda: (x,))
    drawn = lambda: (torch.randint(0, 9, (40,)),)
    assert_kernel(lambda n: n.cumsum(0), reference=lambda n: n.cumsum(0), inputs=drawn)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_kernel(lambda n: known.clone(), reference=lambda n: n.cumsum(0), inputs=drawn)


def test_what_fails_on_other_values_than_a_functions_is_warned_of():
    positive = lambda: (torch.rand(5, 40),)
    with pytest.warns(UserWarning, match="right on the values of `inputs` only.*elements are off"):
        assert_kernel(lambda x: x.clone(), reference=torch.relu, inputs=positive)
    assert_kernel(lambda x: x.clamp(min=0), reference=torch.relu, inputs=positive)  # warnings are errors in tests


def test_dictionaries_are_compared_by_their_keys():
    reference, x = lambda x: {"a": x + 1, "b": x * 2}, torch.randn(5, 40)
    assert_kernel(lambda x: {"b": x * 2, "a": x + 1}, reference=reference, inputs=(x,))
    with pytest.raises(AssertionError, match="elements are off"):
        assert_kernel(lambda x: {"b": x + 1, "a": x * 2}, reference=reference, inputs=(x,))
    with pytest.raises(AssertionError, match=r"returned \['a'\], \['c'\], expected \['a'\], \['b'\]"):
        assert_kernel(lambda x: {"a": x + 1, "c": x * 2}, reference=reference, inputs=(x,))


@pytest.mark.parametrize("returned", [None, 3.0, (), "text", torch.ones(2, dtype=torch.complex64)])
def test_a_reference_without_real_tensors_is_refused(returned):
    with pytest.raises(ValueError, match="the reference returns"):
        assert_kernel(lambda x: returned, reference=lambda x: returned, inputs=(torch.randn(3, 4),))


def test_a_verdict_is_true_only_if_right_and_prints_as_a_sentence():
    right = tw.check(lambda x: torch.softmax(x, -1), "softmax", depth="quick", dtypes=["float32"])
    wrong = tw.check(torch.zeros_like, "softmax", depth="quick", dtypes=["float32"])
    assert right
    assert right.right
    assert not wrong
    assert not wrong.right
    count = len(right.cases)
    assert (
        repr(right)
        == f"<lambda> is right for softmax: {count} of {count} cases, {right.calls} calls; falls back to torch"
    )
    assert repr(wrong).startswith("zeros_like is wrong for softmax: 0 of ")
    assert repr(wrong).endswith(wrong.reason)


@pytest.mark.parametrize("depth", ["quick", "default"])
def test_a_reference_that_does_not_repeat_itself_is_refused(depth):
    dropout = lambda x: torch.nn.functional.dropout(x, 0.1)
    for fn in (lambda x: 2 * x, dropout):
        with pytest.raises(ValueError, match="the reference draws random numbers"):
            assert_kernel(fn, reference=dropout, inputs=(torch.randn(16, 64),), depth=depth)


def test_a_reference_that_differs_by_rounding_between_runs_is_accepted():
    shuffled = lambda x: x[:, torch.randperm(x.shape[1])].sum(-1)
    assert_kernel(lambda x: x.sum(-1), reference=shuffled, inputs=(torch.randn(16, 200),))
    with pytest.raises(AssertionError, match="elements are off"):
        assert_kernel(lambda x: x.sum(-1) + 1e-3, reference=shuffled, inputs=(torch.randn(16, 200),))


def numpy_softmax(x):
    values = x.numpy()
    e = np.exp(values - values.max(-1, keepdims=True))
    return torch.from_numpy(e / e.sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.detach().softmax(-1), "has no gradient; pass forward_only=True"),
        (numpy_softmax, r"has no gradient \(RuntimeError: Can't call numpy\(\).*; pass forward_only=True"),
    ],
)
def test_a_lost_gradient_fails_unless_forward_only(fn, reason):
    arguments = {"reference": lambda x: x.softmax(-1), "inputs": lambda: (torch.randn(16, 70),)}
    with pytest.raises(AssertionError, match=reason):
        assert_kernel(fn, **arguments)
    assert_kernel(fn, forward_only=True, **arguments)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_kernel(lambda x: fn(x) * 1.1, forward_only=True, **arguments)


def test_a_gradient_that_a_reference_lacks_is_not_required():
    assert_kernel(lambda x: x.argmax(-1), reference=lambda x: x.argmax(-1), inputs=(torch.randn(6, 70),))


def test_a_forward_only_function_is_judged_forward_and_labelled():
    cases = registry.load("softmax").check[6:7]
    found = tw.check(numpy_softmax, "softmax", dtypes=["float32"], cases=cases, depth="quick")
    assert found.right, found.reason
    assert "forward only" in found.labels
    assert any(label.startswith("fails if its inputs require a gradient (RuntimeError") for label in found.labels)


def masked_maximum(x):
    top = x.amax(-1, keepdim=True).clamp_min(0)  # as with other=0 under the mask of a maximum
    e = (x - top).exp()
    return e / e.sum(-1, keepdim=True)


class CosineWithoutIncoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].cos()


def rms(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


ROWS, WEIGHT, HEADS = torch.randn(16, 96), torch.randn(96), [torch.randn(2, 16, 32) for _ in range(3)]


@pytest.mark.parametrize(
    ("reference", "wrong", "inputs"),
    [
        (lambda x: x.softmax(-1), masked_maximum, [ROWS]),
        (lambda x: x.softmax(-1), lambda x: x.exp() / x.exp().sum(-1, keepdim=True), [ROWS]),
        (lambda x: x.softmax(-1), lambda x: x.softmax(0), [torch.randn(16, 16)]),
        (lambda x: x.logsumexp(-1), lambda x: x.exp().sum(-1).log(), [ROWS]),
        (torch.nn.functional.softplus, lambda x: (1 + x.exp()).log(), [ROWS]),
        (torch.relu, lambda x: torch.where(x > 0, x, 0.0), [ROWS]),
        (torch.nn.functional.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), [ROWS]),
        (rms, lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * w, [ROWS, WEIGHT]),
        (rms, lambda x, w: rms(x, w.detach()), [ROWS, WEIGHT]),
        (rms, lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt().detach() * w, [ROWS, WEIGHT]),
        (lambda x: x.var(-1), lambda x: x.var(-1, unbiased=False), [ROWS]),
        (lambda x: x.var(-1), lambda x: ((x * x).mean(-1) - x.mean(-1) ** 2) * 96 / 95, [ROWS]),
        (lambda x: x.sin(), CosineWithoutIncoming.apply, [ROWS]),
        (attention, lambda q, k, v: (q @ k.mT).softmax(-1) @ v, HEADS),
        (lambda x: x.sum(-1), lambda x: sum(c.sum(-1) for c in x.split(8, -1)), [ROWS.bfloat16()]),
        (lambda x: x * 2, lambda x: x.mul_(2), [ROWS]),
    ],
)  # fmt: skip
def test_common_mistakes_are_wrong(reference, wrong, inputs):
    with pytest.raises(AssertionError, match="is wrong: "):
        assert_kernel(wrong, reference=reference, inputs=tuple(inputs), depth="quick")


def chaotic(x):
    x = x.sigmoid()
    for _ in range(120):
        x = 3.9 * x * (1 - x)
    return x


@pytest.mark.parametrize(
    ("reference", "wrong", "rows", "reason"),
    [
        (lambda x: (-x.abs() - 1).log(), lambda x: x * float("nan"), 16, "returns only NaN and infinities"),
        (lambda x: 2 * x, lambda x: x, 0, "returns no elements"),
        (chaotic, torch.zeros_like, 16, "has rounding errors as large as its outputs"),
    ],
)
def test_a_comparison_that_proves_nothing_is_not_right(reference, wrong, rows, reason):
    with pytest.raises(AssertionError, match=f"is unsupported: the reference {reason}"):
        assert_kernel(wrong, reference=reference, inputs=lambda: (torch.rand(rows, 64),), forward_only=True)


def test_a_constant_reference_is_compared():
    ones = lambda x: x.softmax(-1).sum(-1, keepdim=True).expand_as(x) * 1
    assert_kernel(torch.ones_like, reference=ones, inputs=lambda: (torch.rand(16, 64),), forward_only=True)


@pytest.mark.parametrize(
    ("reference", "kernel", "shared"),
    [
        (lambda x: x * 1, lambda x: x, "the output with argument 1"),
        (lambda x: x.T.contiguous(), lambda x: x.T, "the output with argument 1"),
        (lambda x: (2 * x, 2 * x), lambda x: (2 * x,) * 2, "output 1 with output 0"),
        (lambda x: x.T, lambda x: x.T, ""),
        (lambda x: (2 * x, 2 * x), lambda x: torch.cat([2 * x, 2 * x]).chunk(2), ""),
    ],
)
def test_outputs_in_memory_that_the_reference_does_not_share_are_labelled(reference, kernel, shared):
    inputs = lambda draw: (draw.randn(8, 6),)
    op = Op("op", reference, lambda *_: Cost(0, 0), inputs, check=[Case(())], bench=[])
    labels = [label for label in tw.check(kernel, op, depth="quick", dtypes=["float32"]).labels if "memory" in label]
    assert labels == [f"shares memory where the reference does not: {shared}"] * bool(shared)
