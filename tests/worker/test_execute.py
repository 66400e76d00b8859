"""One instrumented call: outputs of the wrong kind, and the effects of calls on each other."""

import pytest
import torch

from tilewright.worker.execute import COMPILED, OPCHECK, TRACED, Executor, KernelFailed, OutputSpec, Request
from tilewright.worker.memory import GuardedTensor

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
LIKE_X = [OutputSpec((4, 6), torch.float32)]


def execute(fn, executor=None, **options):
    request = Request([GuardedTensor.copy_of(X, "contiguous")], options.pop("output_specs", LIKE_X), **options)
    return (executor or Executor("cpu")).execute(fn, request)


@pytest.mark.parametrize(
    ("fn", "reason"),
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
def test_outputs_of_another_type_shape_dtype_device_or_layout_are_wrong(fn, reason):
    with pytest.raises(KernelFailed) as failure:
        execute(fn)
    assert failure.value.kind == "wrong"
    assert reason in str(failure.value)


def test_collections_are_flattened_if_the_reference_returns_one():
    named = lambda x: {"b": (x + 1,), "a": x.clone()}
    reply = execute(named, output_specs=LIKE_X * 2, returns_tensor=False, names=["['a']", "['b'][0]"])
    assert torch.equal(reply.outputs[1], X + 1)  # in the order of the keys
    with pytest.raises(KernelFailed, match="expected no keys"):
        execute(named, output_specs=LIKE_X * 2, returns_tensor=False)
    with pytest.raises(KernelFailed, match="returned 1 tensors, expected 2"):
        execute(lambda x: x.clone(), output_specs=LIKE_X * 2, returns_tensor=False)


def test_gradients_are_returned_for_the_inputs_that_need_one():
    grads = [GuardedTensor.copy_of(torch.ones(4, 6), "expanded"), None]
    request = Request([GuardedTensor.copy_of(X, "contiguous")] * 2, LIKE_X * 2, False, grads, needs_grad=[0, 1])
    reply = Executor("cpu").execute(lambda x, y: (x * 2, y * 3), request)
    assert torch.equal(reply.gradients[0], torch.full((4, 6), 2.0))
    assert reply.gradients[1] is None
    assert execute(lambda x: x * 2).gradients == []


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda x: torch.from_numpy(x.numpy() * 2), "Can't call numpy() on Tensor that requires grad"),
        (lambda x: torch.from_numpy(x.detach().numpy() * 2), ""),
    ],
)
def test_a_call_that_fails_only_because_its_inputs_require_a_gradient_is_forward_only(fn, error):
    reply = execute(fn, grads=[GuardedTensor.copy_of(torch.ones(4, 6), "contiguous")], needs_grad=[0])
    assert torch.equal(reply.outputs[0], X * 2)
    assert reply.gradients == []
    assert error in reply.forward_only
    assert bool(reply.forward_only) == bool(error)


def test_a_call_that_always_fails_and_a_backward_that_fails_crash():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no backward")

    def fails(x):
        raise ValueError("no forward")

    for fn, error in ((Broken.apply, "no backward"), (fails, "no forward")):
        with pytest.raises(KernelFailed, match=error) as failure:
            execute(fn, grads=[GuardedTensor.copy_of(torch.ones(4, 6), "contiguous")], needs_grad=[0])
        assert failure.value.kind == "crashed"


def test_the_output_of_a_call_belongs_to_the_caller():
    executor, buffer = Executor("cpu"), torch.zeros(4, 6)
    fresh = lambda x: x * 2
    execute(fresh, executor)
    execute(fresh, executor)
    reused = lambda x: buffer.copy_(x)
    execute(reused, executor)
    with pytest.raises(KernelFailed, match="changed the result of the previous call"):
        execute(reused, executor)
    identity = lambda x: x
    execute(identity, executor)
    execute(identity, executor)


def test_a_call_that_is_not_instrumented_leaves_torch_unpatched():
    real, seen = torch.empty, []

    def fn(x):
        seen.append(torch.empty is real)
        return x * 2

    execute(fn)
    execute(fn, instrumented=False)
    assert seen == [False, True]


def test_reused_memory_has_the_same_address():
    executor, addresses = Executor("cpu"), []

    def fn(x):
        addresses.append(x.data_ptr())
        return x * 2

    execute(fn, executor)
    execute(fn, executor, reuse_memory=True)
    execute(fn, executor)
    assert addresses[0] == addresses[1]


def test_outputs_of_repeated_arguments_are_returned_in_blocks():
    executor = Executor("cpu")
    specs = [OutputSpec((20, 6), torch.float32)]
    execute(lambda x: x * 2, executor, repeat=5, repeated=[0], output_specs=specs)
    for (block,) in executor.blocks([0, 4], 4):
        assert torch.equal(block, X * 2)


def test_torch_operators_are_traced_at_any_depth():
    calls = execute(lambda x: torch.softmax(x + 1, -1), mode=TRACED).calls
    assert ("aten::_softmax", 24) in calls
    assert ("aten::_softmax", 24) in execute(softmax_in_disguise, mode=TRACED).calls
    assert torch._C._len_torch_dispatch_stack() == 0


@torch.library.custom_op("tilewright_tests::softmax_in_disguise", mutates_args=())
def softmax_in_disguise(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_a_function_that_torch_compile_cannot_capture_is_unsupported():
    assert torch.equal(execute(lambda x: x * 2, mode=COMPILED).outputs[0], X * 2)

    def data_dependent(x):
        return x * 2 if float(x.sum()) > 0 else x * 3

    with pytest.raises(KernelFailed, match=r"torch\.compile cannot capture it") as failure:
        execute(data_dependent, mode=COMPILED)
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


def test_registered_operators_must_pass_opcheck():
    assert execute(lambda x: honest_double(x), mode=OPCHECK).calls == [("tilewright_tests::honest_double", 0)]
    assert execute(lambda x: x * 2, mode=OPCHECK).calls == []
    with pytest.raises(KernelFailed, match="secret_change fails torch's opcheck"):
        execute(lambda x: secret_change(x), mode=OPCHECK)
