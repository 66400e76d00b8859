"""One call, watched: results that are not what they should be, and what calls do to each other."""

import pytest
import torch

from tilewright.worker.execute import COMPILED, OPERATORS, SEEN, KernelFailed, Like, Request, Stage
from tilewright.worker.memory import Placed

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
LIKE_X = [Like((4, 6), torch.float32)]


def perform(fn, stage=None, **more):
    request = Request([Placed.of(X, "contiguous")], more.pop("wanted", LIKE_X), **more)
    return (stage or Stage("cpu")).perform(fn, request)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: None, "returned NoneType"),
        (lambda x: [], "returned list"),
        (lambda x: [x.clone()], "returned list"),
        (lambda x: x.clone().as_subclass(type("Mine", (torch.Tensor,), {})), "returned Mine"),
        (lambda x: x[:1].clone(), "has shape (1, 6), expected (4, 6)"),
        (lambda x: x.double(), "has dtype float64, expected float32"),
        (lambda x: x.to("meta"), "has device meta, expected cpu"),
        (lambda x: x.to_sparse(), "has layout torch.sparse_coo"),
        (lambda x: x.new_zeros(1).expand(2**40), "has shape"),
    ],
)
def test_results_of_another_kind_are_wrong_before_their_values_are_looked_at(fn, said):
    with pytest.raises(KernelFailed) as failure:
        perform(fn)
    assert failure.value.kind == "wrong"
    assert said in str(failure.value)


def test_collections_are_flattened_where_the_reference_returns_one():
    reply = perform(lambda x: {"a": x.clone(), "b": (x + 1,)}, wanted=LIKE_X * 2, is_single=False)
    assert torch.equal(reply.outputs[1], X + 1)
    with pytest.raises(KernelFailed, match="returned 1 tensors, expected 2"):
        perform(lambda x: x.clone(), wanted=LIKE_X * 2, is_single=False)


def test_gradients_of_those_that_need_one_and_none_where_nothing_depends():
    grads = [Placed.of(torch.ones(4, 6), "expanded"), None]
    request = Request([Placed.of(X, "contiguous")] * 2, LIKE_X * 2, False, grads, needs=[0, 1])
    reply = Stage("cpu").perform(lambda x, y: (x * 2, y * 3), request)
    assert torch.equal(reply.gradients[0], torch.full((4, 6), 2.0))
    assert reply.gradients[1] is None
    assert perform(lambda x: x * 2).gradients == []


def test_the_result_of_a_call_belongs_to_the_caller():
    stage, buffer = Stage("cpu"), torch.zeros(4, 6)
    fresh = lambda x: x * 2
    perform(fresh, stage)
    perform(fresh, stage)
    reused = lambda x: buffer.copy_(x)
    perform(reused, stage)
    with pytest.raises(KernelFailed, match="changed the result of the call before"):
        perform(reused, stage)
    identity = lambda x: x
    perform(identity, stage)
    perform(identity, stage)


def test_an_unwatched_call_leaves_torch_as_it_is():
    real, seen = torch.empty, []

    def fn(x):
        seen.append(torch.empty is real)
        return x * 2

    perform(fn)
    perform(fn, watched=False)
    assert seen == [False, True]


def test_same_memory_is_the_same_memory():
    stage, places = Stage("cpu"), []

    def fn(x):
        places.append(x.data_ptr())
        return x * 2

    perform(fn, stage)
    perform(fn, stage, same_memory=True)
    perform(fn, stage)
    assert places[0] == places[1]


def test_longer_arguments_are_answered_in_parts():
    stage = Stage("cpu")
    perform(lambda x: x * 2, stage, repeat=5, repeated=[0], wanted=[Like((20, 6), torch.float32)])
    for (block,) in stage.blocks([0, 4], 4):
        assert torch.equal(block, X * 2)


def test_operators_of_torch_are_seen_at_any_depth():
    calls = perform(lambda x: torch.softmax(x + 1, -1), how=SEEN).calls
    assert ("aten::_softmax", 24) in calls
    assert ("aten::_softmax", 24) in perform(softmax_in_disguise, how=SEEN).calls
    assert torch._C._len_torch_dispatch_stack() == 0


@torch.library.custom_op("tilewright_tests::softmax_in_disguise", mutates_args=())
def softmax_in_disguise(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_what_torch_compile_cannot_capture_is_unsupported_and_what_it_captures_is_called():
    assert torch.equal(perform(lambda x: x * 2, how=COMPILED).outputs[0], X * 2)

    def data_dependent(x):
        return x * 2 if float(x.sum()) > 0 else x * 3

    with pytest.raises(KernelFailed, match=r"torch\.compile cannot capture it") as failure:
        perform(data_dependent, how=COMPILED)
    assert failure.value.kind == "unsupported"


@torch.library.custom_op("tilewright_tests::honest_double", mutates_args=())
def honest_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@honest_double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("tilewright_tests::secret_change", mutates_args=())
def secret_change(x: torch.Tensor) -> torch.Tensor:
    return x.zero_() + 1


@secret_change.register_fake
def _(x):
    return torch.empty_like(x)


def test_registered_operators_are_held_against_their_schema():
    assert perform(lambda x: honest_double(x), how=OPERATORS).calls == [("tilewright_tests::honest_double", 0)]
    assert perform(lambda x: x * 2, how=OPERATORS).calls == []
    with pytest.raises(KernelFailed, match="secret_change fails torch's opcheck"):
        perform(lambda x: secret_change(x), how=OPERATORS)
