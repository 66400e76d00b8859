"""Registered operators: called through the dispatcher if something observes it, directly otherwise."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from support import DispatchLog
from tilewright.runtime.operator import contiguous_like, operator

calls: list[str] = []


@operator("test_double", fake=contiguous_like)
def double(x: Tensor, times: int) -> Tensor:
    calls.append("called")
    return x * 2**times


def _save(ctx, inputs, output) -> None:
    ctx.times = inputs[1]


def _backward(ctx, dy: Tensor):
    return dy * 2**ctx.times, None


double.differentiate(_save, _backward)


@operator("test_zero", fake=lambda x: None, mutates=("x",))
def zero(x: Tensor) -> None:
    x.zero_()


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def test_a_dispatch_mode_sees_the_registered_operator():
    with DispatchLog() as mode:
        double(torch.ones(3), 1)
    assert "tilewright::test_double" in mode.operators
    assert calls == ["called"]


def test_fake_tensors_never_reach_the_function():
    with torch._subclasses.FakeTensorMode():
        assert double(torch.ones(3, 4), 1).shape == (3, 4)
    assert not calls


@pytest.mark.parametrize("how", ["plain", "observed", "compiled"])
def test_values_and_gradients_on_every_path(how):
    x = torch.randn(5, requires_grad=True)
    fn = torch.compile(double, fullgraph=True, backend="aot_eager") if how == "compiled" else double
    if how == "observed":
        with DispatchLog():
            y = fn(x, 2)
    else:
        y = fn(x, 2)
    torch.testing.assert_close(y, 4 * x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), (torch.full((5,), 4.0),))


def test_no_autograd_node_without_gradients():
    x = torch.randn(5, requires_grad=True)
    assert double(x, 1).grad_fn is not None
    assert double(x.detach(), 1).grad_fn is None
    with torch.no_grad():
        assert double(x, 1).grad_fn is None


@operator("test_copy", fake=contiguous_like)
def copy(x: Tensor) -> Tensor:
    assert x.data_ptr()  # a tensor that has left a transform has no pointer until it is unwrapped
    return x.clone()


copy.differentiate(lambda ctx, inputs, output: None, lambda ctx, dy: dy)


def test_a_tensor_that_has_left_a_transform_is_unwrapped():
    kept: list[Tensor] = []
    torch.func.grad(lambda x: kept.append(3 * x) or x.sum())(torch.ones(3))
    assert torch.equal(copy(kept[0]), torch.full((3,), 3.0))


def test_inside_a_transform_torch_raises():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: copy(x).sum())(torch.ones(3))


def test_opcheck():
    torch.library.opcheck(double.registered, (torch.randn(3, requires_grad=True), 1))
    torch.library.opcheck(zero.registered, (torch.randn(3),))


def test_mutated_arguments_are_declared():
    x = torch.ones(3)
    zero(x)
    assert (x == 0).all()
    version = x._version
    torch.compile(lambda x: zero(x), fullgraph=True, backend="aot_eager")(x.fill_(1))
    assert (x == 0).all()
    assert x._version > version


class Scale(NamedTuple):
    power: int
    negate: bool = False


@operator("test_scale", fake=contiguous_like)
def scale(x: Tensor, bias: Tensor | None, options: Scale) -> Tensor:
    y = x * 2**options.power
    return -y if options.negate else y


def _save_scale(ctx, inputs, output) -> None:
    ctx.options = inputs[2]


def _backward_scale(ctx, dy: Tensor) -> Tensor:
    return scale(dy, None, ctx.options)


scale.differentiate(_save_scale, _backward_scale)


@pytest.mark.parametrize("how", ["plain", "observed", "compiled"])
def test_options_travel_as_one_argument_and_missing_gradients_are_none(how):
    x, bias = torch.randn(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    call = lambda x, bias: scale(x, bias, Scale(2, negate=True))
    if how == "observed":
        with DispatchLog():
            y = call(x, bias)
    else:
        y = (torch.compile(call, fullgraph=True, backend="aot_eager") if how == "compiled" else call)(x, bias)
    torch.testing.assert_close(y, -4 * x)
    gradients = torch.autograd.grad(y.sum(), (x, bias), allow_unused=True)
    torch.testing.assert_close(gradients[0], torch.full((5,), -4.0))
    assert gradients[1] is None or not gradients[1].any()  # a compiled graph gives zeros
    torch.library.opcheck(scale.registered, (torch.randn(3, requires_grad=True), None, 1, True))
