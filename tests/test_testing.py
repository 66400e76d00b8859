"""The verifier in two lines, for functions of one's own."""

import pytest
import torch

import tilewright as tw
from tilewright.errors import UnknownOp
from tilewright.testing import assert_kernel


def test_check_gives_a_verdict_of_a_function():
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


def test_a_function_that_does_what_the_reference_does_passes():
    examples = (torch.randn(5, 40), torch.randn(40), 0.5)
    assert_kernel(lambda x, w, eps: torch.addcmul(torch.full((), eps), x, w), reference=scaled, inputs=examples)
    assert_kernel(scaled, reference=scaled, inputs=lambda: (torch.rand(5, 40), torch.rand(40), 0.5))


def test_several_results_and_results_without_gradient():
    both = lambda x: (x.sin(), x.argmax(-1))
    assert_kernel(both, reference=both, inputs=(torch.randn(6, 70),))
    with pytest.raises(AssertionError, match="output 1"):
        assert_kernel(lambda x: (x.sin(), x.argmin(-1)), reference=both, inputs=(torch.randn(6, 70),))


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: x.bfloat16().softmax(-1).float(), "elements are off"),
        (lambda x: x.detach().softmax(-1) + 0 * x, "gradient of x"),
        (lambda x: torch.softmax(x.contiguous().data_ptr() * 0 + x.as_strided(x.shape, (70, 1)), -1), "off|bounds"),
        (lambda x: x.softmax(-1) * 0, "elements are off"),
    ],
)
def test_a_function_that_does_not_fails_with_what_is_wrong(fn, said):
    with pytest.raises(AssertionError, match=said):
        assert_kernel(fn, reference=lambda x: x.softmax(-1), inputs=(torch.randn(50, 70),))


def test_where_it_is_wrong_is_drawn():
    upper = lambda x: torch.cat([x[:32].softmax(-1), x[32:]])
    with pytest.raises(AssertionError) as failure:
        assert_kernel(upper, reference=lambda x: x.softmax(-1), inputs=(torch.randn(64, 70),))
    picture = str(failure.value).splitlines()[1:]
    assert picture == ["·" * 64] * 8 + ["█" * 64] * 8


def test_inputs_must_hold_a_tensor():
    with pytest.raises(TypeError, match="tuple with a tensor"):
        assert_kernel(scaled, reference=scaled, inputs=(1, 2))
