"""The verifier for functions of one's own."""

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright import registry
from tilewright.errors import UnknownOp
from tilewright.testing import assert_kernel


def test_check_returns_the_verdict_on_a_function():
    right = tw.check(lambda x: torch.softmax(x, -1), "softmax", depth="quick", dtypes=["float32"])
    assert (right.verdict, right.op, right.labels) == ("right", "softmax", ["falls back to torch"])
    wrong = tw.check(torch.zeros_like, "softmax", depth="quick", dtypes=["float32"])
    assert wrong.verdict == "wrong"
    with pytest.raises(ValueError, match="depth"):
        tw.check(torch.zeros_like, "softmax", depth="deep")
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
